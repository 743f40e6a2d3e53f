"""The variables that only one cloud's Terraform module takes: their values in Python, their types in Terraform."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from provisioner.models import Record, Role


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
            for name, field in cls.model_fields.items()
            for annotation in field.metadata
            if isinstance(annotation, TerraformType)
        }


@dataclass(frozen=True)
class StackValues:
    """What a cloud adds to the Terraform variables of one environment.

    Args:
        images: each role's image, as the cloud's Terraform module names it.
        variables: the variables that only this cloud's module takes.
    """

    images: Mapping[Role, str]
    variables: ModuleVariables
