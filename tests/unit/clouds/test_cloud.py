"""The variables that only one cloud's Terraform module takes, in Python and in Terraform."""

from __future__ import annotations

import re

import pytest

from provisioner.base.config import data_directory
from provisioner.clouds.aws.stacks import AwsVariables
from provisioner.clouds.cloud import ModuleVariables
from provisioner.clouds.local.cloud import LocalVariables

# Those that the module of every cloud takes (provisioner/terraform/render.py, EnvironmentSpec).
COMMON = {"environment_id", "full_internet", "allowed_destinations", "machines"}


@pytest.mark.parametrize(("cloud", "variables"), [("local", LocalVariables), ("aws", AwsVariables)])
def test_the_variables_and_their_types_are_those_of_the_module(cloud: str, variables: type[ModuleVariables]) -> None:
    text = (data_directory("terraform") / cloud / "environment" / "variables.tf").read_text()
    blocks = re.findall(r'^variable "(\w+)" {\n(.*?)^}', text, re.MULTILINE | re.DOTALL)
    types = {
        name: re.search(r"^  type += (.*?)(?=^  \w+ |^  validation|\Z)", body, re.M | re.S) for name, body in blocks
    }
    module = {name: " ".join(found[1].split()) for name, found in types.items() if found and name not in COMMON}
    assert module.keys() == variables.model_fields.keys()
    ours = {name: " ".join(text.split()) for name, text in variables.terraform_types().items()}
    assert {name: _plain(text) for name, text in ours.items()} == {name: _plain(text) for name, text in module.items()}


def _plain(text: str) -> str:
    """A type without the white space and commas in which its two spellings may differ."""
    return re.sub(r"[\s,]+", "", text)
