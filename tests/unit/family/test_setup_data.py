from __future__ import annotations

import json

import pytest

from provisioner.errors import UsageError
from provisioner.family.setup_data import closest, parse_setup_data, require_task
from provisioner.models import GpuSpec, SetupData, ShellBuildStep, VMSpec

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


def test_optional_keys_of_a_spec_may_be_null() -> None:
    keys = ("cpu_architecture", "gpu_spec", "base_image_type", "build_steps")
    spec = {"cpu_count_range": [1, 1], "ram_gib_range": [1, 1], **dict.fromkeys(keys)}
    parsed = parse_setup_data({"tasks": {"a": {"aux_vm_spec": spec}}}).tasks["a"].aux_vm_spec
    assert parsed == VMSpec(cpu_count_range=(1, 1), ram_gib_range=(1, 1))


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
