from __future__ import annotations

import json
from typing import Any

import pytest

from provisioner.base.errors import TaskFamilyError, UsageError
from provisioner.base.models import FileBuildStep, GpuSpec, SetupData, ShellBuildStep, VMSpec
from provisioner.family.setup_data import closest, parse_setup_data, parse_vm_spec, require_task

FULL = {
    "standard_version": "0.5.0",
    "tasks": {
        "main": {
            "permissions": ["full_internet"],
            "instructions": "Find the flag.\n",
            "required_environment_variables": ["KEY", "VM_IP_ADDRESS", "KEY"],
            "aux_vm_spec": {
                "cpu_count_range": [0.5, 2],
                "ram_gib_range": [1, 4],
                "cpu_architecture": "x64",
                "gpu_spec": {"count_range": [1, 2.0], "model": "h100"},
                "base_image_type": "ubuntu-20.04-cuda",
                "build_steps": [{"type": "shell", "commands": ["apt-get install -y docker.io"]}],
            },
        },
        "plain": {"permissions": [], "instructions": "", "required_environment_variables": [], "aux_vm_spec": None},
    },
    "has_score": True,
    "has_teardown": True,
    "warnings": ["no get_instructions"],
}


def test_full_setup_data_is_read_and_survives_being_written() -> None:
    setup = parse_setup_data(FULL)
    task = setup.tasks["main"]
    assert task.full_internet
    assert task.required_environment_variables == ("KEY", "VM_IP_ADDRESS")
    assert task.aux_vm_spec == VMSpec(
        cpu_count_range=(0.5, 2),
        ram_gib_range=(1, 4),
        cpu_architecture="x64",
        gpu_spec=GpuSpec(count_range=(1, 2), model="h100"),
        base_image_type="ubuntu-20.04-cuda",
        build_steps=(ShellBuildStep(type="shell", commands=("apt-get install -y docker.io",)),),
    )
    assert not setup.tasks["plain"].full_internet
    assert (setup.has_score, setup.has_intermediate_score, setup.has_teardown) == (True, False, True)
    assert SetupData.model_validate_json(setup.model_dump_json()) == setup


@pytest.mark.parametrize(
    ("version", "recorded"), [(None, None), ("0.3.1", "0.3.1"), (0.5, "0.5"), ([1], "a list of 1"), ("\n", r"'\n'")]
)
def test_any_standard_version_is_recorded_and_none_is_refused(version: object, recorded: str | None) -> None:
    assert parse_setup_data({"standard_version": version, "tasks": {"a": {}}}).standard_version == recorded


def test_long_warnings_are_cut() -> None:
    setup = parse_setup_data({"tasks": {"a": {}}, "warnings": ["w" * 10_000]})
    assert [len(warning) for warning in setup.warnings] == [4096]


def test_a_task_is_found_by_its_exact_name() -> None:
    setup = parse_setup_data(json.loads(json.dumps(FULL)))
    assert require_task(setup, "family", "plain") == setup.tasks["plain"]


def test_an_unknown_task_lists_the_nearest_names_first() -> None:
    setup = parse_setup_data({"tasks": {name: {} for name in ("count", "find_flag", "Find_Flag_Hard", "escape")}})
    with pytest.raises(UsageError) as caught:
        require_task(setup, "family", "find_flag_hrad")
    assert caught.value.message.splitlines()[1:] == ["  - 'Find_Flag_Hard'", "  - 'find_flag'"]


def test_a_name_like_no_other_still_gets_some_names() -> None:
    assert closest("zzz", ["b", "a"]) == ["b", "a"]


def test_of_very_many_names_the_first_are_compared() -> None:
    others = [f"{number:0256}" for number in range(1000)]
    assert closest("word", ["ward", *others]) == ["ward"]
    assert closest("word", [*others, "ward"]) == others[:5]


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
