"""What get_aux_vm_spec may return. What it may not is in bad_inputs.py."""

from __future__ import annotations

from typing import Any

import pytest

from provisioner.errors import TaskFamilyError
from provisioner.family.setup_data import parse_vm_spec
from provisioner.models import FileBuildStep, GpuSpec, ShellBuildStep, VMSpec

RANGES: dict[str, Any] = {"cpu_count_range": [1, 2], "ram_gib_range": [0.5, 4]}
DEFAULTS = VMSpec(cpu_count_range=(1, 2), ram_gib_range=(0.5, 4))


def test_two_ranges_are_enough() -> None:
    assert parse_vm_spec(RANGES, "spec") == DEFAULTS
    assert (DEFAULTS.base_image_type, DEFAULTS.cpu_architecture, DEFAULTS.build_steps) == ("debian-12", None, ())


def test_keys_that_may_be_left_out_may_be_null() -> None:
    optional = ("cpu_architecture", "gpu_spec", "base_image_type", "build_steps")
    assert parse_vm_spec({**RANGES, **dict.fromkeys(optional)}, "spec") == DEFAULTS


def test_a_full_spec_is_read() -> None:
    steps = [{"type": "shell", "commands": ["ls"]}, {"type": "file", "source": "a", "destination": "b"}]
    full = {
        "cpu_architecture": "x64",
        "gpu_spec": {"count_range": [1, 8], "model": "h100"},
        "base_image_type": "ubuntu-20.04-cuda",
        "build_steps": steps,
    }
    spec = parse_vm_spec({**RANGES, **full}, "spec")
    assert spec.gpu_spec == GpuSpec(count_range=(1, 8), model="h100")
    assert (spec.cpu_architecture, spec.base_image_type) == ("x64", "ubuntu-20.04-cuda")
    assert spec.build_steps == (
        ShellBuildStep(type="shell", commands=("ls",)),
        FileBuildStep(type="file", source="a", destination="b"),
    )


@pytest.mark.parametrize("pair", [[2, 2], (2, 2), [2.0, 2]], ids=["list", "tuple", "float"])
def test_a_range_may_be_one_number_twice(pair: object) -> None:
    assert parse_vm_spec({**RANGES, "cpu_count_range": pair}, "spec").cpu_count_range == (2, 2)


@pytest.mark.parametrize(
    ("key", "value"),
    [("gpu_spec", {"count_range": [1, 1], "model": "m" * 65}), ("gpu_spec", {"count_range": [1, 1], "model": "a\x1b"}),
     ("cpu_architecture", ["x64"]), ("ram_gib_range", None)],
    ids=["long", "escape", "list", "null"],
)  # fmt: skip
def test_messages_name_the_place(key: str, value: object) -> None:
    with pytest.raises(TaskFamilyError, match=key) as caught:
        parse_vm_spec({**RANGES, key: value}, "Task 'main': spec")
    assert caught.value.message.startswith("Task 'main': spec")
    assert caught.value.message.isprintable()


def test_a_base_image_for_primary_machines_alone_is_refused() -> None:
    with pytest.raises(TaskFamilyError, match=r"must be one of debian-12, ubuntu-20\.04-cuda, not 'debian-13'"):
        parse_vm_spec({**RANGES, "base_image_type": "debian-13"}, "spec")
