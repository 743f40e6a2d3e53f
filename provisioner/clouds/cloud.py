"""The interface of a cloud: what each cloud defines. defaults.py has what only some clouds have, but for `fallback`.

No cloud imports the registry that lists it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from provisioner.clouds.defaults import (
    CleanUp,
    Images,
    Isolation,
    Machines,
    Placement,
    Requirements,
    Sizing,
    Snapshots,
    Stacks,
)
from provisioner.clouds.findings import EnvironmentResources
from provisioner.clouds.module_variables import ModuleVariables, StackValues

if TYPE_CHECKING:
    from provisioner.family.manifest import Resources
    from provisioner.models import BaseImage, Environment, MachineSize, Role, VMSpec
    from provisioner.progress import Progress


class Cloud(Requirements, Sizing, Images, Placement, Stacks, Machines, Isolation, Snapshots, CleanUp, ABC):
    """A place where machines run."""

    name: str
    """As `--cloud` takes it; terraform/NAME holds its modules."""
    module_variables: ClassVar[type[ModuleVariables]]
    """The variables that only this cloud's module takes."""

    def fallback(self) -> Cloud | None:
        """Returns the same cloud in the next region that the operator allows; None, the default, if there is none."""
        return None

    @abstractmethod
    def choose(self, resources: Resources, aux: VMSpec | None) -> dict[Role, MachineSize]:
        """Chooses the smallest, or cheapest, machines that satisfy a task's manifest and its aux VM's spec.

        Raises:
            UnavailableError: the cloud cannot provide them.
        """

    @abstractmethod
    def builder_size(self, base: BaseImage, disk_gib: int) -> MachineSize:
        """Chooses the machine in which an image is built."""

    @abstractmethod
    def base_image(self, base: BaseImage, progress: Progress) -> str:
        """Returns the name of a base image, building it if necessary; or of the vendor's image to build it from."""

    @abstractmethod
    def capture(self, environment: Environment, name: str, destination: Path) -> None:
        """Turns the disk of the powered-off builder into an image, described in the directory `destination`."""

    @abstractmethod
    def stack_values(self, environment: Environment) -> StackValues:
        """Returns what this cloud adds to the environment's Terraform variables."""

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
    def gateways(self, environment: Environment) -> list[str]:
        """Lists addresses at which a machine might reach the controller; the first is its management card's gateway."""

    @abstractmethod
    def move_ttl(self, environment: Environment) -> None:
        """Moves what ends the machines from outside to the record's `expires_at`. Safe to repeat."""

    @abstractmethod
    def survey(self, regions: Sequence[str] | None) -> list[EnvironmentResources]:
        """Lists everything in the cloud that carries our tags or lies in this home.

        Args:
            regions: where to look; None for all regions.
        """

    @abstractmethod
    def clear(self, resources: EnvironmentResources) -> bool:
        """Removes what a survey found. Safe to repeat.

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
