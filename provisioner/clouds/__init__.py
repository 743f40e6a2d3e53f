"""The Cloud protocol: all that differs between places to run. Nothing else lives here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # Terraform starts modules of this package often, and pydantic takes them a tenth of a second
    from datetime import datetime
    from decimal import Decimal

    from provisioner.costs.prices import CostLine
    from provisioner.errors import TerraformError
    from provisioner.family.manifest import Resources
    from provisioner.models import BaseImage, Environment, MachineSize, Role, VMSpec
    from provisioner.progress import Progress
    from provisioner.remote.ssh import Connection


UNFINISHED = "unfinished"
"""In a foundation's stack, while it is made: a Terraform that is killed forgets what it was just making."""


@dataclass(frozen=True)
class Foundation:
    """What environments stand on and share: a stack of the cloud's module `network`.

    Args:
        stack: its name.
        values: the module's variables.
        root_files: what the cloud adds to the root.
        new: whether it is made for the first time; else environments may be using it while it changes.
    """

    stack: str
    values: dict[str, Any]
    root_files: dict[str, str]
    new: bool


@dataclass(frozen=True)
class Ending:
    """Why a machine does not run any more, as far as the cloud says.

    Args:
        words: the cloud's; empty where it says nothing.
        by_itself: whether it was switched off from within.
    """

    words: str = ""
    by_itself: bool = False


@dataclass(frozen=True)
class Found:
    """What a cloud holds under the id of one environment, however it got there.

    Args:
        environment: the id that its tags, or its paths, name.
        things: in words.
        region: where; empty where a cloud has none.
        home: the identity of the provisioner home that made it; empty where that is not known.
        owner: who made it.
        created_at, expires_at, leased_until: as its tags and the cloud say; None where they do not.
    """

    environment: str
    things: tuple[str, ...]
    region: str = ""
    home: str = ""
    owner: str = ""
    created_at: datetime | None = None
    expires_at: datetime | None = None
    leased_until: datetime | None = None


class Cloud(Protocol):
    """A place to run. Back ends do not import the registry that lists them."""

    name: str
    region: str
    """Where in the cloud environments start; empty where it has no regions."""
    parallelism: int | None
    """How many things Terraform may make at once; None: as many as it likes."""

    def problems(self) -> list[tuple[str, str]]:
        """What this controller lacks, as (problem, how to mend it). Empty: all is there."""

    def notes(self) -> list[str]:
        """What works, but could work better."""

    def choose(self, resources: Resources, aux: VMSpec | None) -> dict[Role, MachineSize]:
        """The machines of one environment: the smallest, or cheapest, that its manifest and aux VM's spec ask for.

        Raises:
            UnavailableError: the cloud cannot give them.
        """

    def costs(self, sizes: Mapping[Role, MachineSize], *, full_internet: bool, spot: bool) -> tuple[CostLine, ...]:
        """What an environment costs by the hour; nothing where nobody bills.

        Args:
            spot: whether it may be on the spot market, if the operator wants that.

        Raises:
            UnavailableError: a price is not known.
        """

    def usd_per_hour(self, environment: Environment) -> Decimal:
        """What a created environment costs where it is, in US dollars; never raises for want of a price."""

    def builder_size(self, base: BaseImage, disk_gib: int) -> MachineSize:
        """The machine in which an image is built."""

    def base_image(self, base: BaseImage, progress: Progress) -> str:
        """The name of a base image, built where it is missing; or of the vendor's image to make it from."""

    def holds(self, image: Path) -> bool:
        """Whether machines can boot from a finished image; False: its directory describes what is gone."""

    def adopt(self, name: str, destination: Path) -> bool:
        """Describes in a directory an image that another controller has made; False: the cloud has none."""

    def keep_when_off(self, environment: Environment) -> None:
        """Lets a builder's machine stay when it powers itself off: until then that would have been its end."""

    def capture(self, environment: Environment, name: str, destination: Path) -> None:
        """Turns the powered-off builder's disk into an image, described in a directory."""

    def discard(self, image: Path) -> None:
        """Removes what an image has outside its directory. Safe to repeat."""

    def prepare(self, environment: Environment, authorized_keys: Mapping[Role, Mapping[str, str]]) -> None:
        """Lays out what the machines boot with: per role, user -> lines of authorized keys. Before any apply."""

    def place(self, environment: Environment) -> dict[str, str]:
        """Where in the cloud to create the environment first."""

    def elsewhere(self, environment: Environment, error: TerraformError) -> tuple[str, dict[str, str]] | None:
        """Why the environment could not be created where it was, and where to try next; None: not for its place.

        Raises:
            CapacityError: it was, and there is nowhere else.
        """

    def foundation(self, environment: Environment) -> Foundation | None:
        """What has to be made before the environment can be; None: it is there, or nothing is needed."""

    def raze(self, environment: Environment) -> None:
        """Removes what this home made of a foundation in an attempt that was cut short. Safe to repeat."""

    def stack_values(self, environment: Environment) -> dict[str, Any]:
        """What this cloud adds to the environment's Terraform variables: at least each role's image."""

    def root_files(self, environment: Environment) -> dict[str, str]:
        """What this cloud adds to the files of the environment's Terraform root."""

    def host_key(self, environment: Environment, role: Role) -> str | None:
        """The machine's SSH host key, `TYPE BASE64`, told by the cloud; None: not known yet."""

    def seal(self, environment: Environment, connections: Mapping[Role, Connection]) -> None:
        """The last change to machines that are up, before anything of the task runs in them."""

    def alive(self, environment: Environment, role: Role) -> bool:
        """Whether the machine runs, asked of the cloud."""

    def ending(self, environment: Environment, role: Role) -> Ending:
        """Why a machine does not run any more."""

    def console(self, environment: Environment, role: Role) -> str:
        """What the machine wrote to its console, bounded; empty where there is none."""

    def move_limit(self, environment: Environment) -> None:
        """Moves the limits outside the machines to the record's `expires_at`. Safe to repeat."""

    def renew(self, environment: Environment) -> None:
        """Tells other controllers that this one looks after the environment."""

    def survey(self, regions: Sequence[str] | None) -> list[Found]:
        """All that exists in the cloud and carries our tags, or lies in this home.

        Args:
            regions: where to look; None for all.
        """

    def clear(self, found: Found) -> bool:
        """Removes what was found. Safe to repeat.

        Returns:
            whether it had been created to its end: no Terraform that outlived its controller makes more of it.

        Raises:
            StillThereError: something would not go.
        """

    def left(self, environment: Environment) -> list[str]:
        """What still exists of an environment, asked of the cloud; empty: it is gone."""

    def remove(self, environment: Environment) -> None:
        """Removes what Terraform left behind. Safe to repeat."""

    def gateways(self, environment: Environment) -> list[str]:
        """Addresses under which a machine might find the controller; the first is its management card's gateway."""

    def fallback(self) -> Cloud | None:
        """The same cloud in the next place that the operator allows, where this one has no capacity; None: no more."""
