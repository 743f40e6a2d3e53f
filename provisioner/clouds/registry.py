"""Lists the clouds. The only place that chooses one by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from provisioner.base.config import Settings, checked
from provisioner.base.errors import UsageError, extras_named
from provisioner.clouds.cloud import Cloud
from provisioner.store.home import Home

DEFAULT_CLOUD = "local"


@dataclass(frozen=True)
class Where:
    """Which cloud, and where in it.

    Args:
        regions: the first is used, the others where it lacks capacity.
        profile: of the cloud's own configuration, of an environment's record; None for the settings'.
        spot: whether to try the spot market first.
        state: where Terraform's state is, by the same; None for what the settings say.
    """

    cloud: str = DEFAULT_CLOUD
    regions: tuple[str, ...] = ()
    profile: str | None = None
    spot: bool = False
    state: str | None = None

    @classmethod
    def of(cls, cloud: str, placement: Mapping[str, str]) -> Where:
        """Returns where an environment is, according to its record."""
        region = placement.get("region")
        return cls(cloud, (region,) if region else (), placement.get("profile"), state=placement.get("state"))


@dataclass(frozen=True)
class CloudEntry:
    """A cloud that can be chosen.

    Args:
        open: makes the Cloud.
        has_places: whether there is a choice of regions, profiles, markets and states.
        is_billed: whether its machines cost anything; the local cloud's are the operator's own.
        not_priced: what it bills besides what the ledger counts, in words; empty for nothing.
    """

    open: Callable[[Home, Settings, Where], Cloud]
    has_places: bool
    is_billed: bool
    not_priced: str = ""


def _local(home: Home, settings: Settings, _: Where) -> Cloud:
    from provisioner.clouds.local.cloud import LocalCloud

    return LocalCloud(home, settings)


def _aws(home: Home, settings: Settings, where: Where) -> Cloud:
    with extras_named():
        from provisioner.clouds.aws.cloud import AwsCloud  # boto3 takes its time, and only this needs it

    for region in where.regions:
        checked(region=region)
    checked(profile=where.profile or "", state=where.state or "")
    return AwsCloud(home, settings, where.regions, where.profile, spot=where.spot, state=where.state)


# AWS's pricing pages as of 2026-11: EBS (standard snapshots), EventBridge (Scheduler).
_NOT_PRICED_ON_AWS = (
    "what is sent beyond egress_gb until CloudWatch shows it, the storage of images (0.05 USD a GB and month) and "
    "schedules (the account's first 14 million a month cost nothing)"
)
CLOUDS: dict[str, CloudEntry] = {
    "local": CloudEntry(_local, has_places=False, is_billed=False),
    "aws": CloudEntry(_aws, has_places=True, is_billed=True, not_priced=_NOT_PRICED_ON_AWS),
}


def not_priced(name: str) -> str:
    """Returns what a cloud bills besides what the ledger counts, in words; empty if there is nothing."""
    return CLOUDS[name].not_priced if name in CLOUDS else ""


def clouds_with_places() -> str:
    """Returns the names of the clouds that have regions and markets, for messages."""
    return " or ".join(name for name, entry in CLOUDS.items() if entry.has_places)


def open_cloud(home: Home, settings: Settings, where: Where) -> Cloud:
    """Opens the cloud that `where` names.

    Raises:
        UsageError: there is no such cloud, or it has no such place.
    """
    if where.cloud not in CLOUDS:
        raise UsageError(f"There is no cloud {where.cloud!r}.", hint=f"Known: {', '.join(sorted(CLOUDS))}.")
    entry = CLOUDS[where.cloud]
    if not entry.has_places and (where.regions or where.spot):
        raise UsageError(f"Region and spot are for the cloud {clouds_with_places()}.", settings=("cloud",))
    return entry.open(home, settings, where)
