"""The Cloud protocol: all that differs between places to run. Nothing else lives here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # Terraform starts modules of this package often, and pydantic takes them a tenth of a second
    from provisioner.models import Environment, MachineSize, Role, VMSpec
    from provisioner.progress import Progress


class Cloud(Protocol):
    """A place to run. Back ends do not import the registry that lists them."""

    name: str

    def problems(self) -> list[tuple[str, str]]:
        """What this controller lacks, as (problem, how to mend it). Empty: all is there."""

    def notes(self) -> list[str]:
        """What works, but could work better."""

    def check_sizes(self, sizes: Mapping[Role, MachineSize], *, primary_gpu: bool, aux: VMSpec | None) -> None:
        """Raises UnavailableError if the cloud cannot give these machines to one environment."""

    def base_image(self, role: Role, progress: Progress) -> str:
        """The name of the base image for a role, built where it is missing."""

    def prepare(self, environment: Environment, secrets: dict[Role, dict[str, str]]) -> None:
        """Lays out what the machines boot with: per role, credential name -> value. Before any apply."""

    def stack_values(self, environment: Environment) -> dict[str, Any]:
        """What this cloud adds to the environment's Terraform variables: at least each role's image."""

    def alive(self, environment: Environment, role: Role) -> bool:
        """Whether the machine runs, asked of the cloud."""

    def capture(self, environment: Environment, destination: Path) -> None:
        """Turns the powered-off builder's disk into an image in the directory `destination`."""

    def console(self, environment: Environment, role: Role) -> str:
        """What the machine wrote to its console, bounded; empty where there is none."""

    def left(self, environment: Environment) -> list[str]:
        """What still exists of an environment, asked of the cloud; empty: it is gone."""

    def remove(self, environment: Environment) -> None:
        """Removes what Terraform left behind. Safe to repeat."""

    def gateways(self, environment: Environment) -> list[str]:
        """Addresses under which a machine might find the controller; the first is its management card's gateway."""
