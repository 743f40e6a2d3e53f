"""What only some clouds have: each part's defaults say what a cloud without it does."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from provisioner.clouds.findings import Capture, Scarcity, TerminationReason, UnrecordedImage
from provisioner.errors import UnavailableError

if TYPE_CHECKING:
    from provisioner.costs.prices import CostLine
    from provisioner.errors import TerraformError
    from provisioner.models import Destination, Environment, MachineSize, Role
    from provisioner.ssh.connection import Connection

UNFINISHED = "unfinished"
"""File in a shared network's stack while Terraform makes it: if killed, Terraform forgets what it was just making."""


@dataclass(frozen=True)
class SharedNetwork:
    """The stack of a cloud's Terraform module `network`, which several environments share.

    Args:
        stack: the stack's name.
        values: the module's variables.
        root_files: what the cloud adds to the Terraform root.
        new: whether it is created for the first time; otherwise environments may be using it while it changes.
    """

    stack: str
    values: dict[str, Any]
    root_files: dict[str, str]
    new: bool


class Requirements:
    """What the controller needs before it can use the cloud."""

    least_terraform: tuple[int, int] = (1, 9)
    """The oldest version of Terraform that works here, as the modules' `required_version` says."""

    def problems(self) -> list[tuple[str, str]]:
        """Lists what this controller lacks, as (problem, remedy). By default, nothing."""
        return []

    def notes(self) -> list[str]:
        """Lists what is worth knowing about the cloud's configuration. By default, nothing."""
        return []

    def missing_rights(self, environment: Environment) -> list[str]:
        """Lists what the credentials may not do with an environment that is up, as dry runs. By default, none."""
        return []


class Sizing:
    """What machines cost, and for how many there is room."""

    scarcity: Scarcity | None = None
    """What `capacity` counts; None, as by default, if nothing is scarce."""

    def costs(self, sizes: Mapping[Role, MachineSize], *, has_way_out: bool, spot: bool) -> tuple[CostLine, ...]:
        """Estimates what an environment costs per hour. By default nothing: such a cloud bills nothing.

        Args:
            has_way_out: whether its machines reach the internet or an allowlist.
            spot: whether the environment may use the spot market, if the operator asked for it.

        Raises:
            UnavailableError: a price is not known.
        """
        return ()

    def room(self, sizes: Mapping[Role, MachineSize]) -> str:
        """Says what the machines need of something that is short here, and how much of it there is. By default "".

        Raises nothing: it is for an estimate. What does not fit is refused before it is created.
        """
        return ""

    def shortage(self, sizes: Mapping[Role, MachineSize], count: int) -> str:
        """Says what is too short here for so many more environments with such machines. By default "": nothing is.

        Raises nothing.
        """
        return ""

    def capacity(self, sizes: Mapping[Role, MachineSize]) -> int | None:
        """Returns for how many more environments with such machines there is room here, for batches.

        None if that is not known, or, as by default, if nothing is scarce.
        """
        return None

    def not_priced(self) -> str:
        """Says what an environment may cost besides, which no estimate includes. By default "": there is nothing."""
        return ""

    def usd_per_hour(self, environment: Environment) -> Decimal:
        """Returns what a created environment costs where it is, in US dollars. By default zero.

        Never raises for want of a price.
        """
        return Decimal(0)


class Images:
    """Images that are found, kept as layers, or consist of more than their directories."""

    keeps_layers: bool = False
    """Whether `keep_layer` can be called, and machines may get files of the family after they have booted."""

    def keep_layer(self, environment: Environment, destination: Path) -> None:
        """Turns a copy of a running builder's disk into an image, described in the directory `destination`.

        Raises:
            CapacityError: there is no room for it.
        """
        raise UnavailableError("Only the local cloud keeps layers of images.")

    def has_image(self, image: Path) -> bool:
        """Whether machines can boot from the finished image that a directory describes.

        By default True: the image is its directory.
        """
        return True

    def find_image(self, name: str, destination: Path) -> bool:
        """Describes in a directory an image that another controller has built. By default there are none.

        Returns:
            whether the cloud has such an image.
        """
        return False

    def keep_when_off(self, environment: Environment) -> None:
        """Lets a builder's machine survive powering itself off. By default it does so anyway."""

    def discard(self, image: Path) -> None:
        """Removes what an image consists of outside its directory. By default nothing. Safe to repeat."""

    def unrecorded_images(self, region: str) -> list[UnrecordedImage]:
        """Lists images that homes have made, this one or others, and this one does not have. By default none."""
        return []


class Placement:
    """Where in the cloud an environment is created, and where next if there is no capacity."""

    region: str = ""
    """Where in the cloud environments start; empty where it has no regions."""

    def place(self, environment: Environment) -> dict[str, str]:
        """Chooses where to create the environment first. By default there is only one place, without a name."""
        return {}

    def next_place(self, environment: Environment, error: TerraformError) -> tuple[str, dict[str, str]] | None:
        """Decides whether a failure has to do with where the environment was to be created.

        Returns:
            the reason, and where to try next; None if the place is not to blame, as by default it never is. The same
            place again: whatever the environment had there has been removed.

        Raises:
            CapacityError: the place is to blame, and there is no other to try.
        """
        return None


class Stacks:
    """What Terraform is given to create environments."""

    parallelism: int | None = None
    """How many resources Terraform may create at once; None for Terraform's default."""

    def terraform_variables(self, ours: Mapping[str, str]) -> dict[str, str]:
        """Returns the environment variables that only this cloud's provider and state backend read; by default none.

        Asked before each Terraform command.

        Args:
            ours: the controller's environment variables.

        Raises:
            HostError: the operator has to log in first.
        """
        return {}

    def await_turn(
        self, environment: Environment, machines: int, tell: Callable[[str], None], check: Callable[[], None]
    ) -> None:
        """Waits until the cloud takes the launches of an apply. By default it takes them at once.

        Args:
            environment: one of the apply's; all its `machines` are in one place.
            tell: receives a line if it takes long.
            check: called while it waits; raises to end that.
        """

    def check_allowlist(self, allowed: Collection[Destination]) -> None:
        """Raises UsageError if an allowlist is too long for the cloud. By default none is."""

    def allowlist_room(self, allowed: Collection[Destination]) -> str:
        """Says how much of what is short an allowlist takes, and how much there is. By default "": that is no concern.

        Raises:
            UsageError: it is too long.
        """
        self.check_allowlist(allowed)
        return ""

    def root_files(self, environment: Environment) -> dict[str, str]:
        """Returns what this cloud adds to the files of the environment's Terraform root. By default nothing."""
        return {}

    def shared_network(self, environment: Environment) -> SharedNetwork | None:
        """Returns the network that has to be created or changed before the environment can be created.

        None if it is there already, or, as by default, if environments share nothing.
        """
        return None

    def remove_shared_network(self, environment: Environment) -> None:
        """Removes what an interrupted attempt of this home created of a shared network. Safe to repeat."""


class Machines:
    """Machines that are up: who may log in to them, and what the cloud says of them."""

    def harden(self, environment: Environment, connections: Mapping[Role, Connection]) -> None:
        """Makes the last changes to machines that are up, before anything of the task runs in them.

        By default machines boot hardened.
        """

    def termination_reason(self, environment: Environment, role: Role) -> TerminationReason:
        """Returns why a machine no longer runs. By default the cloud does not say."""
        return TerminationReason()

    def impairment(self, environment: Environment, role: Role) -> str:
        """Returns what the cloud says is wrong with a running machine's host; empty, as by default, if all is well.

        Nothing that the machine itself does may count.
        """
        return ""

    def standstill(self, environment: Environment, role: Role) -> str:
        """Says why a machine that lives cannot answer, as far as this host knows that at once; empty by default.

        The machine may have brought it about: it excuses nothing.
        """
        return ""

    def console(self, environment: Environment, role: Role) -> str:
        """Returns the end of what the machine wrote to its console; empty, as by default, if there is none."""
        return ""

    def versions(self, environment: Environment) -> dict[str, str]:
        """Returns the versions of what runs an environment's machines, as far as they are known. Asks no machine."""
        return {}

    def unreachable_hint(self, environment: Environment) -> str | None:
        """What to do if a machine has booted and SSH does not reach it. By default no advice."""
        return None

    def is_locked_out(self, environment: Environment) -> bool:
        """Whether the machines let in other addresses than this controller has now. By default they never do."""
        return False

    def admit(self, environment: Environment) -> None:
        """Lets this controller's present address in. Safe to repeat. By default nothing."""

    def renew_lease(self, environment: Environment) -> None:
        """Tells other controllers that this one looks after the environment. By default there are no others."""


class Isolation:
    """What the cloud itself knows of what an environment's machines can reach, whatever the machines say."""

    def isolation_differences(self, environment: Environment) -> list[str]:
        """Compares what the cloud sees with what the task's permission calls for. Called after the probes have run.

        Returns:
            a line for each difference. By default none: the cloud sees nothing that the probes do not.

        Raises:
            MachineLostError: a machine has ended on its own since.
        """
        return []


class Snapshots:
    """Running machines frozen, from which other machines resume. By default a cloud has none."""

    def snapshot_needs(self, environment: Environment) -> dict[str, str]:
        """Returns what the state of an environment's machines depends on here, in the cloud's own terms.

        Raises:
            UnavailableError: this cloud freezes no machines.
        """
        raise UnavailableError("Only environments of the local cloud can be frozen.")

    def freeze(self, environment: Environment, directory: Path) -> None:
        """Freezes all machines of an environment at one moment. They resume afterwards, whatever happens.

        Args:
            directory: an empty directory, for a directory of each machine.

        Raises:
            CapacityError: there is no room for what would be kept.
            InfrastructureError: it failed.
        """
        raise UnavailableError("Only environments of the local cloud can be frozen.")


class CleanUp:
    """Where the cloud is searched for what exists, and what it captured of machines' cards."""

    def open_regions(self, tell: Callable[[str], None]) -> list[str] | None:
        """Lists the regions in which these credentials may look. By default None: there are no regions.

        Args:
            tell: receives a line about those in which they may not.
        """
        return None

    def end_machines(self, environments: Collection[Environment]) -> None:
        """Has the cloud end environments' machines, before Terraform removes what would end them at their time.

        Waits for nothing. By default it does nothing: what ends machines is no resource of Terraform's.

        Raises:
            HostError, InfrastructureError: the cloud does not do it.
        """

    def captures(self, environment: Environment) -> list[Capture]:
        """Lists what was captured of the machines' cards. It goes with the machines. By default nothing."""
        return []
