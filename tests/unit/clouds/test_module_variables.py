from __future__ import annotations

import pytest

from provisioner import package_data
from provisioner.clouds.aws.stacks import AwsVariables
from provisioner.clouds.local.cloud import LocalVariables
from provisioner.clouds.module_variables import ModuleVariables


@pytest.mark.parametrize(("cloud", "variables"), [("local", LocalVariables), ("aws", AwsVariables)])
def test_every_variable_has_a_terraform_type_and_is_one_of_the_module(
    cloud: str, variables: type[ModuleVariables]
) -> None:
    module = (package_data.directory("terraform") / cloud / "environment" / "variables.tf").read_text()
    assert variables.terraform_types().keys() == variables.model_fields.keys()
    assert [name for name in variables.model_fields if f'variable "{name}"' not in module] == []
