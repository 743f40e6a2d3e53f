"""Tests rendering environments as the files of a Terraform root."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from provisioner.base.config import data_directory
from provisioner.base.models import Destination
from provisioner.clouds.local.cloud import LocalVariables
from provisioner.terraform.render import (
    OPENTOFU_VERSION,
    VALUES,
    EnvironmentSpec,
    MachineSpec,
    render_network,
    render_stack,
    render_values,
)


def spec(name: str = "one", image: str = "/nowhere/disk.raw", **changes: object) -> EnvironmentSpec:
    """Returns the spec of an offline environment with one machine."""
    machine = MachineSpec(image=image, cpus=2, memory_gib=1.5, disk_gib=8, public_key="ssh-ed25519 AAAA")
    known = {"environment_id": name, "full_internet": False, "machines": {"primary": machine}}
    return EnvironmentSpec.model_validate(
        {**known, "variables": LocalVariables(directory=f"/nowhere/{name}"), **changes}
    )


def test_a_stack_carries_a_copy_of_its_module() -> None:
    files = render_stack("local", LocalVariables, {"one": spec()})
    module = data_directory("terraform") / "local" / "environment"
    copied = {name.rsplit("/", 1)[1]: text for name, text in files.items() if name.startswith("modules/")}
    assert copied == {path.name: path.read_text() for path in module.glob("*.tf")}
    assert set(files) - {f"modules/environment/{name}" for name in copied} == {"main.tf", OPENTOFU_VERSION, VALUES}


def test_opentofu_finds_in_each_root_how_new_it_has_to_be() -> None:
    network = {"region": "eu-west-1", "availability_zones": {}, "controllers": {}, "seen": {}, "tags": {}}
    for files in (render_stack("local", LocalVariables, {"one": spec()}), render_network("aws", network)):
        assert 'required_version = ">= 1.10.6"' in files[OPENTOFU_VERSION]
        assert ">= 1.10.6" not in files["main.tf"]


def test_the_root_is_the_same_whatever_the_environments_are() -> None:
    single = render_stack("local", LocalVariables, {"one": spec()})
    many = render_stack(
        "local", LocalVariables, {"two": spec("two", image='${file("/etc/passwd")}{{ 7 * 7 }}'), "three": spec("three")}
    )
    assert {name for name in single if single[name] != many[name]} == {VALUES}


def test_the_values_are_the_modules_variables() -> None:
    allowed = (Destination(cidr="192.0.2.1/32", port=443, host_names=("api.example",)),)
    values = json.loads(render_values({"one": spec(allowed_destinations=allowed)})[VALUES])
    assert values == {
        "environments": {
            "one": {
                "environment_id": "one",
                "directory": "/nowhere/one",
                "full_internet": False,
                "allowed_destinations": [{"cidr": "192.0.2.1/32", "port": 443}],
                "machines": {
                    "primary": {
                        "image": "/nowhere/disk.raw",
                        "cpus": 2,
                        "memory_gib": 1.5,
                        "disk_gib": 8,
                        "public_key": "ssh-ed25519 AAAA",
                    }
                },
            }
        }
    }


@given(st.text())
def test_any_text_comes_out_of_the_values_as_it_went_in(text: str) -> None:
    values = json.loads(render_values({"one": spec(image=text)})[VALUES])
    assert values["environments"]["one"]["machines"]["primary"]["image"] == text


@pytest.mark.parametrize("memory_gib", [float("nan"), float("inf")])
def test_a_size_that_json_cannot_hold_is_refused(memory_gib: float) -> None:
    with pytest.raises(ValidationError):
        MachineSpec(image="/nowhere", cpus=1, memory_gib=memory_gib, disk_gib=8, public_key="ssh-ed25519 AAAA")


def test_a_role_that_is_no_name_is_refused() -> None:
    with pytest.raises(ValidationError):
        spec(machines={"../third": spec().machines["primary"]})
