# ruff: noqa: B027  an empty method is the default of a cloud that has nothing to do
"""The interface of a cloud, and what a cloud answers. Defaults say what a cloud without a part does.

No cloud imports the registry that lists it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from provisioner.base.errors import UnavailableError
from provisioner.base.models import Record, Role
from provisioner.costs.prices import CostLine, Egress

if TYPE_CHECKING:  # reading manifests takes YAML, and SSH paramiko, which take long to import
    from provisioner.base.errors import TerraformError
    from provisioner.base.models import BaseImage, Destination, Environment, MachineSize, VMSpec
    from provisioner.base.progress import Progress
    from provisioner.family.manifest import Resources
    from provisioner.recording.isolation import Surface
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
        remove: removes what an interrupted attempt of this home created of it. Safe to repeat.
    """

    stack: str
    values: dict[str, Any]
    root_files: dict[str, str]
    new: bool
    remove: Callable[[], None]


@dataclass(frozen=True)
class TerraformType:
    """A type as Terraform writes it, for the annotation of a field."""

    expression: str


class ModuleVariables(Record):
    """The variables that a cloud's module `environment` takes besides those that every cloud's takes.

    Each field is one variable, annotated with its TerraformType.
    """

    @classmethod
    def terraform_types(cls) -> dict[str, str]:
        """Returns each variable's type in Terraform's language, by name."""
        return {
            name: annotation.expression
            for name, variable in cls.model_fields.items()
            for annotation in variable.metadata
            if isinstance(annotation, TerraformType)
        }


@dataclass(frozen=True)
class StackValues:
    """What a cloud adds to the Terraform variables of one environment.

    Args:
        images: each role's image, as the cloud's Terraform module names it.
        variables: the variables that only this cloud's module takes.
        root_files: files for the Terraform root, the same for all environments of a stack.
    """

    images: Mapping[Role, str]
    variables: ModuleVariables
    root_files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TerminationReason:
    """Why a machine no longer runs, as far as the cloud says.

    Args:
        message: in the cloud's words; empty where it gives none.
        from_within: whether the machine was switched off from inside, or may itself have made its host end it. None if
            the cloud cannot tell: it neither blames the machine nor excuses it.
    """

    message: str = ""
    from_within: bool | None = False


@dataclass(frozen=True)
class EnvironmentResources:
    """What exists in a cloud under the id of one environment, however it got there.

    Args:
        environment: the id that the resources' tags or paths name.
        resources: a description of each.
        region: where they are; empty where a cloud has no regions.
        home: the identity of the provisioner home that created them; empty where it is not known.
        owner: the user that created them.
        created_at, expires_at, leased_until: as the tags and the cloud say; None where they do not.
    """

    environment: str
    resources: tuple[str, ...] = ()
    region: str = ""
    home: str = ""
    owner: str = ""
    created_at: datetime | None = None
    expires_at: datetime | None = None
    leased_until: datetime | None = None


class UnrecordedImage(Record):
    """An image in the cloud that a provisioner home has made and this home does not have: in use elsewhere, or lost.

    Args:
        home: the identity of the home that made it; empty where it is not known.
        owner: the user that created it.
        gib: the size of its disk; what is stored of it may be less.
        used_at: when a machine last started from it; None where the cloud does not say.
        removal: the shell commands that delete it.
    """

    name: str
    region: str
    home: str
    owner: str
    gib: int
    created_at: datetime
    used_at: datetime | None
    removal: tuple[str, ...]


@dataclass(frozen=True)
class Scarcity:
    """Describes what limits how many environments exist at once on a cloud.

    Args:
        room: what has room, as the beginning of "... for 3 of 5 environments".
        remedy: how to have more of it, as a sentence.
        each_controller: whether each controller has its own, rather than all of an account the same.
    """

    room: str
    remedy: str
    each_controller: bool


@dataclass(frozen=True)
class Capture:
    """What passed through one card of a machine.

    Args:
        role: the machine's.
        card: the card's name: `link`, or `internet`.
        path: a file in libpcap's format, which may be growing.
    """

    role: Role
    card: str
    path: Path


class Cloud(ABC):
    """A place where machines run."""

    name: str
    """As `--cloud` takes it; terraform/NAME holds its modules."""
    module_variables: ClassVar[type[ModuleVariables]]
    """The variables that only this cloud's module takes."""

    # Requirements

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

    # Sizes and prices

    scarcity: Scarcity | None = None
    """What `capacity` counts; None, as by default, if nothing is scarce."""

    @abstractmethod
    def choose(self, resources: Resources, aux: VMSpec | None) -> dict[Role, MachineSize]:
        """Chooses the smallest, or cheapest, machines that satisfy a task's manifest and its aux VM's spec.

        Raises:
            UnavailableError: the cloud cannot provide them.
            HostError: the controller cannot run them as it must.
        """

    @abstractmethod
    def builder_size(self, base: BaseImage, disk_gib: int) -> MachineSize:
        """Chooses the machine in which an image is built."""

    def costs(self, sizes: Mapping[Role, MachineSize], *, has_way_out: bool, spot: bool) -> tuple[CostLine, ...]:
        """Estimates what an environment costs per hour. By default nothing: such a cloud bills nothing.

        Args:
            has_way_out: whether its machines reach the internet or an allowlist.
            spot: whether the environment may use the spot market, if the operator asked for it.

        Raises:
            UnavailableError: a price is not known.
        """
        return ()

    egress_gb: Decimal = Decimal(0)
    """How many gigabytes an environment with a way out may send; 0, without a bound, where traffic is not billed."""

    def egress(self) -> Egress:
        """Returns how much an environment with a way out may send, and its price."""
        return Egress()

    def sent_bytes(self, region: str, launched: Mapping[str, datetime]) -> dict[str, int]:
        """Asks the cloud how many bytes machines have sent, as far as it shows that by now.

        Args:
            region: where they are or were.
            launched: the cloud's ids of machines, and when each was launched; empty only to require that it answers.

        Raises:
            HostError, InfrastructureError: it does not answer.
        """
        return dict.fromkeys(launched, 0)

    def room(self, sizes: Mapping[Role, MachineSize]) -> str:
        """Says what the machines need of something that is short here, and how much of it there is. By default "".

        Raises nothing: it is for an estimate. What does not fit is refused before it is created.
        """
        return ""

    def accelerator(self) -> str:
        """Says in words what would run machines' instructions here. By default "": all machines are alike."""
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

    def usd_per_hour(self, environment: Environment) -> Decimal:
        """Returns what a created environment costs where it is, in US dollars. By default zero.

        Never raises for want of a price.
        """
        return Decimal(0)

    # Images

    keeps_layers: bool = False
    """Whether `keep_layer` can be called, and machines may get files of the family after they have booted."""

    @abstractmethod
    def base_image(self, base: BaseImage, progress: Progress) -> str:
        """Returns the name of a base image, building it if necessary; or of the vendor's image to build it from."""

    @abstractmethod
    def capture(self, environment: Environment, name: str, destination: Path) -> None:
        """Turns the disk of the powered-off builder into an image, described in the directory `destination`."""

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

    # Places

    region: str = ""
    """Where in the cloud environments start; empty where it has no regions."""

    def fallback(self) -> Cloud | None:
        """Returns the same cloud in the next region that the operator allows; None, the default, if there is none."""
        return None

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

    # Stacks

    parallelism: int | None = None
    """How many resources Terraform may create at once; None for Terraform's default."""

    @abstractmethod
    def stack_values(self, environment: Environment) -> StackValues:
        """Returns what this cloud adds to the environment's Terraform variables."""

    def terraform_variables(self, ours: Mapping[str, str]) -> dict[str, str]:
        """Returns the environment variables that only this cloud's provider and state backend read; by default none.

        Asked before each Terraform command.

        Args:
            ours: the controller's environment variables.

        Raises:
            HostError: the operator has to log in first.
        """
        return {}

    def acquire_launches(
        self, environment: Environment, machines: int, tell: Callable[[str], None], check: Callable[[], None]
    ) -> None:
        """Waits until the cloud takes the launches of an apply. By default it takes them at once.

        Args:
            environment: one of the apply's; all its `machines` are in one place.
            tell: receives a line if it takes long.
            check: called while it waits; raises to end that.
        """

    def check_allowlist(self, allowed: Collection[Destination]) -> str:
        """Says how much of what is short an allowlist takes, and how much there is. By default "": that is no concern.

        Raises:
            UsageError: it is too long.
        """
        return ""

    def shared_network(self, environment: Environment) -> SharedNetwork | None:
        """Returns the network that has to be created or changed before the environment can be created.

        None if it is there already, or, as by default, if environments share nothing.
        """
        return None

    def explain_network_failure(self, environment: Environment, error: TerraformError) -> None:
        """Raises what a failure to create the shared network means, if the cloud knows. By default it does not.

        Raises:
            CapacityError: there is no room for it in this place.
            HostError: the cloud refuses these credentials or this account.
        """

    # Machines that are up

    @abstractmethod
    def prepare(self, environment: Environment, authorized_keys: Mapping[Role, Mapping[str, str]]) -> None:
        """Writes what the machines boot with. Called before Terraform runs.

        Args:
            authorized_keys: for each role, user -> lines of authorized_keys.
        """

    @abstractmethod
    def host_key(self, environment: Environment, role: Role) -> str | None:
        """Returns the machine's SSH host key as `TYPE BASE64`, from the cloud; None if it is not known yet."""

    @abstractmethod
    def alive(self, environment: Environment, role: Role) -> bool:
        """Asks the cloud whether the machine runs."""

    @abstractmethod
    def move_ttl(self, environment: Environment) -> None:
        """Moves what ends the machines from outside to the record's `expires_at`. Safe to repeat."""

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

    def authorize(self, environment: Environment, open_network: Callable[[], None]) -> None:
        """Lets this controller in if its address has changed since the environment was created.

        Safe to repeat. By default nothing: such machines let in any address.

        Args:
            open_network: called first in that case; opens what environments share.

        Raises:
            HostError, InfrastructureError: the cloud does not do it, or another controller would have to.
        """

    def renew_lease(self, environment: Environment) -> None:
        """Tells other controllers that this one looks after the environment. By default there are no others."""

    # Isolation

    gateways: Mapping[bool, tuple[str, ...]]
    """Addresses at which machines with (True) or without internet might reach the controller.

    The first is their management card's gateway.
    """

    @property
    def closed(self) -> tuple[str, ...]:
        """Addresses that machines with the internet must not reach. By default none is probed."""
        return ()

    is_silent: bool = False
    """Whether packets that may not leave vanish without an answer: a refusal then came from outside."""

    def ways_to_controllers(self, environment: Environment) -> tuple[str, ...]:
        """Returns addresses to which routes lead for the sake of answers, and which a machine must not call itself.

        By default there are none.
        """
        return ()

    def isolation_differences(self, environment: Environment) -> list[str]:
        """Compares what the cloud sees with what the task's permission calls for. Called after the probes have run.

        Returns:
            a line for each difference. By default none: the cloud sees nothing that the probes do not.

        Raises:
            MachineLostError: a machine has ended on its own since.
        """
        return []

    def surface(self, environment: Environment) -> dict[Role, Surface]:
        """Returns what each machine meets of its host, as seen from outside. By default nothing: no cloud shows it.

        Raises:
            IsolationError: it cannot be seen.
        """
        return {}

    # Snapshots

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

    # Clean-up

    @abstractmethod
    def list_resources(self, regions: Sequence[str] | None) -> list[EnvironmentResources]:
        """Lists everything in the cloud that carries our tags or lies in this home.

        Args:
            regions: where to look; None for all regions.
        """

    @abstractmethod
    def delete_resources(self, resources: EnvironmentResources) -> bool:
        """Removes what `list_resources` found. Safe to repeat.

        Returns:
            whether the environment had been created completely, so that no Terraform that outlived its controller
            can still create more of it.

        Raises:
            StillThereError: a resource could not be removed.
        """

    @abstractmethod
    def remaining(self, environment: Environment) -> list[str]:
        """Asks the cloud what still exists of an environment; empty if it is gone."""

    @abstractmethod
    def remove(self, environment: Environment) -> None:
        """Removes what Terraform left behind of an environment. Safe to repeat.

        Raises:
            StillThereError: a resource could not be removed.
        """

    def open_regions(self, tell: Callable[[str], None]) -> list[str] | None:
        """Lists the regions in which these credentials may look. By default None: there are no regions.

        Args:
            tell: receives a line about those in which they may not.
        """
        return None

    def end_machines(self, environments: Collection[Environment]) -> set[str]:
        """Ends environments' machines, before Terraform removes what would end them at their ttl.

        Waits for nothing. By default it does nothing: what ends machines is no resource of Terraform's.

        Returns:
            the cloud's ids of machines that it does not bill any more, although they may take long to be gone.

        Raises:
            HostError, InfrastructureError: the cloud does not do it.
        """
        return set()

    def captures(self, environment: Environment) -> list[Capture]:
        """Lists what was captured of the machines' cards. It goes with the machines. By default nothing."""
        return []
