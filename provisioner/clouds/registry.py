"""Which clouds there are. The only place that asks which one it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from provisioner.clouds.cloud import Cloud
from provisioner.config import Settings, checked
from provisioner.errors import UsageError
from provisioner.store.home import Home

DEFAULT_CLOUD = "local"


@dataclass(frozen=True)
class Where:
    """Which cloud, and where in it.

    Args:
        regions: the first is used, the others where it lacks capacity.
        state: None for what the settings say.
    """

    cloud: str = DEFAULT_CLOUD
    regions: tuple[str, ...] = ()
    profile: str | None = None
    spot: bool = False
    state: str | None = None

    @classmethod
    def of(cls, cloud: str, placement: Mapping[str, str]) -> Where:
        """Where an environment is, by its record."""
        region = placement.get("region")
        return cls(cloud, (region,) if region else (), placement.get("profile"), state=placement.get("state"))


def _local(home: Home, settings: Settings, where: Where) -> Cloud:
    from provisioner.clouds.local.cloud import LocalCloud

    if where.regions or where.profile or where.spot or where.state:
        raise UsageError("--region, --profile, --spot and --state are for --cloud aws.")
    return LocalCloud(home, settings)


def _aws(home: Home, settings: Settings, where: Where) -> Cloud:
    from provisioner.clouds.aws.cloud import AwsCloud  # boto3 takes its time, and only this needs it

    for region in where.regions:
        checked(region=region)
    checked(profile=where.profile or "", state=where.state or "")
    return AwsCloud(home, settings, where.regions, where.profile, spot=where.spot, state=where.state)


CLOUDS: dict[str, Callable[[Home, Settings, Where], Cloud]] = {"local": _local, "aws": _aws}


def open_cloud(home: Home, settings: Settings, where: Where) -> Cloud:
    """The cloud with a name.

    Raises:
        UsageError: there is no such cloud, or it knows no such place.
    """
    if where.cloud not in CLOUDS:
        raise UsageError(f"There is no cloud {where.cloud!r}.", hint=f"Known: {', '.join(sorted(CLOUDS))}.")
    return CLOUDS[where.cloud](home, settings, where)
