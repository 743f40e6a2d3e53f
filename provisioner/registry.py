"""Which clouds there are. The only place that asks which one it is."""

from __future__ import annotations

from collections.abc import Callable

from provisioner.clouds import Cloud
from provisioner.clouds.local import LocalCloud
from provisioner.errors import UsageError
from provisioner.paths import Home
from provisioner.settings import Settings

CLOUDS: dict[str, Callable[[Home, Settings], Cloud]] = {"local": LocalCloud}
DEFAULT_CLOUD = "local"


def open_cloud(name: str, home: Home, settings: Settings) -> Cloud:
    """The cloud with this name.

    Raises:
        UsageError: there is no such cloud.
    """
    if name not in CLOUDS:
        raise UsageError(f"There is no cloud {name!r}.", hint=f"Known: {', '.join(sorted(CLOUDS))}.")
    return CLOUDS[name](home, settings)
