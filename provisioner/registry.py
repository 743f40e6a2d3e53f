"""Lists the clouds and opens one by its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from provisioner.clouds import Cloud
from provisioner.config import Settings, checked
from provisioner.errors import UsageError
from provisioner.store.home import Home

DEFAULT_CLOUD = "local"


@dataclass(frozen=True)
class Where:
    """A cloud, and the place in it.

    Args:
        regions: the first is used; the others are tried if it lacks capacity.
        state: where Terraform's state is kept; None for the place that the settings name.
    """

    cloud: str = DEFAULT_CLOUD
    regions: tuple[str, ...] = ()
    profile: str | None = None
    spot: bool = False
    state: str | None = None

    @classmethod
    def of(cls, cloud: str, placement: Mapping[str, str]) -> Where:
        """Returns the place that an environment's record names."""
        region = placement.get("region")
        return cls(cloud, (region,) if region else (), placement.get("profile"), state=placement.get("state"))


def _local(home: Home, settings: Settings, where: Where) -> Cloud:
    from provisioner.clouds.local import LocalCloud

    if where.regions or where.profile or where.spot or where.state:
        raise UsageError("--region, --profile, --spot and --state need --cloud aws.")
    return LocalCloud(home, settings)


def _aws(home: Home, settings: Settings, where: Where) -> Cloud:
    from provisioner.clouds.aws.cloud import AwsCloud  # boto3 is slow to import, and only this needs it

    for region in where.regions:
        checked(region=region)
    checked(profile=where.profile or "", state=where.state or "")
    return AwsCloud(home, settings, where.regions, where.profile, spot=where.spot, state=where.state)


CLOUDS: dict[str, Callable[[Home, Settings, Where], Cloud]] = {"local": _local, "aws": _aws}


def open_cloud(home: Home, settings: Settings, where: Where) -> Cloud:
    """Opens the cloud with a name.

    Raises:
        UsageError: there is no such cloud, or the cloud has no such place.
    """
    if where.cloud not in CLOUDS:
        raise UsageError(f"There is no cloud {where.cloud!r}.", hint=f"Use one of: {', '.join(sorted(CLOUDS))}.")
    return CLOUDS[where.cloud](home, settings, where)
