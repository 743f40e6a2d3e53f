"""Renders environments as the files of a Terraform root. Reads our own templates and modules, and nothing else.

Jinja renders only structure and names of our own. Values from a family or a machine go into
environments.auto.tfvars.json as data: unlike in .tf files, Terraform evaluates no ${...} there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jinja2 import Environment as Jinja
from jinja2 import FileSystemLoader, StrictUndefined, Template
from pydantic import Field, SerializeAsAny

from provisioner.base.config import data_directory
from provisioner.base.models import Destination, Record, Role
from provisioner.clouds.cloud import ModuleVariables
from provisioner.terraform.process import LEAST_OPENTOFU

VALUES = "environments.auto.tfvars.json"
NETWORK_VALUES = "network.auto.tfvars.json"
# Terraform does not read this file. OpenTofu says by it that it is too old, before it stumbles over anything else.
OPENTOFU_VERSION = "opentofu.tofu"


class MachineSpec(Record):
    """One machine, as the modules' variable `machines` describes it."""

    image: str
    cpus: int
    memory_gib: float = Field(allow_inf_nan=False)  # JSON, and so a .tfvars.json file, has neither NaN nor infinities
    disk_gib: int
    public_key: str


class EnvironmentSpec(Record):
    """One environment, as the modules' variables describe it.

    Args:
        variables: those that only this cloud's module takes.
    """

    environment_id: str
    full_internet: bool
    allowed_destinations: tuple[Destination, ...] = ()
    machines: dict[Role, MachineSpec]
    variables: SerializeAsAny[ModuleVariables]


def render_stack(
    cloud: str, variables: type[ModuleVariables], environments: Mapping[str, EnvironmentSpec]
) -> dict[str, str]:
    """Renders the files of a stack's Terraform root.

    The modules are copied into the root, so that the code that created a stack can destroy it even if another version
    of provisioner is installed by then.

    Args:
        cloud: the name of the cloud whose modules are used.
        variables: those that only this cloud's module takes.
        environments: the stack's environments by id.

    Returns:
        the text of each file, by its path relative to the stack's directory.
    """
    main = _template("stack.tf.j2").render(extra_variables=variables.terraform_types())
    return _module(cloud, "environment") | {"main.tf": main} | _opentofu() | render_values(environments)


def render_network(cloud: str, values: Mapping[str, Any]) -> dict[str, str]:
    """Renders the files of the Terraform root of the network that a cloud's environments share.

    Args:
        cloud: the name of the cloud whose modules are used.
        values: the variables of the cloud's module `network`.
    """
    main = _template("network.tf.j2").render()
    written = {"main.tf": main, NETWORK_VALUES: json.dumps({"network": values}, indent=2)}
    return _module(cloud, "network") | written | _opentofu()


def _opentofu() -> dict[str, str]:
    least = ".".join(map(str, LEAST_OPENTOFU))
    return {OPENTOFU_VERSION: f'terraform {{\n  required_version = ">= {least}"\n}}\n'}


def _module(cloud: str, name: str) -> dict[str, str]:
    module = data_directory("terraform") / cloud / name
    return {f"modules/{name}/{path.name}": path.read_text() for path in sorted(module.glob("*.tf"))}


def _template(name: str) -> Template:
    jinja = Jinja(  # noqa: S701 - it renders HCL, not HTML
        loader=FileSystemLoader(data_directory("templates")),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    return jinja.get_template(name)


def render_values(environments: Mapping[str, EnvironmentSpec]) -> dict[str, str]:
    """Renders the file with the values, the only one that changes when an environment joins or leaves a stack."""
    values = {
        name: {
            **spec.model_dump(exclude={"variables": True, "allowed_destinations": {"__all__": {"host_names"}}}),
            **spec.variables.model_dump(mode="json"),
        }
        for name, spec in environments.items()
    }
    return {VALUES: json.dumps({"environments": values}, indent=2)}
