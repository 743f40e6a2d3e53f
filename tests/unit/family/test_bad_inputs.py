"""Everything that strangers can get wrong: each bad input has its own clear message and exit code 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from provisioner.errors import TaskFamilyError, UsageError
from provisioner.family.build_steps import check_build_steps, parse_build_steps
from provisioner.family.manifest import parse_manifest
from provisioner.family.setup_data import parse_setup_data
from tests.unit.family.bad_inputs import TABLE, file_step


@pytest.mark.parametrize("name", TABLE)
def test_bad_input_has_its_own_message_and_exit_code_2(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        TABLE[name].read(tmp_path)
    assert TABLE[name].says in caught.value.message
    assert caught.value.exit_code == 2
    assert caught.value.message.isprintable() or "\n  - " in caught.value.message
    assert len(caught.value.message) < 1000


def test_no_two_bad_inputs_have_the_same_message(tmp_path: Path) -> None:
    messages: dict[str, str] = {}
    for number, (name, bad) in enumerate(TABLE.items()):
        directory = tmp_path / str(number)
        directory.mkdir()
        with pytest.raises(UsageError) as caught:
            bad.read(directory)
        # The family's own directory is no part of what tells two messages apart.
        messages[name] = caught.value.message.replace(str(directory), "")
    same = {one for one in messages for other in messages if one != other and messages[one] == messages[other]}
    assert same == set()


def test_a_nested_link_to_a_sibling_is_refused(tmp_path: Path) -> None:
    family = tmp_path / "family"
    (family / "assets" / "deep").mkdir(parents=True)
    (tmp_path / "family_evil").mkdir()
    (family / "assets" / "deep" / "link").symlink_to("../../../family_evil")
    copied = parse_build_steps([file_step("assets")], "aux")
    with pytest.raises(TaskFamilyError, match=r"'assets/deep/link' leads out of the family directory"):
        check_build_steps(copied, family)


def test_the_table_has_at_least_45_bad_inputs() -> None:
    assert len(TABLE) >= 45


HOSTILE = [
    "$(reboot)",
    "`id`",
    "; rm -rf /",
    '${file("/etc/passwd")}',
    "%{ for x in y }",
    "{{ 7 * 7 }}",
    "{% raw %}",
    "'\"",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_shell_hcl_and_jinja_syntax_passes_through_as_data(text: str) -> None:
    value = {
        text: {
            "instructions": text,
            "aux_vm_spec": {
                "cpu_count_range": [1, 1],
                "ram_gib_range": [1, 1],
                "build_steps": [
                    {"type": "shell", "commands": [text]},
                    {"type": "file", "source": text, "destination": text},
                ],
            },
        }
    }
    parsed = parse_setup_data({"tasks": value}).tasks[text]
    assert parsed.instructions == text
    assert parsed.aux_vm_spec is not None
    assert [step.model_dump() for step in parsed.aux_vm_spec.build_steps] == [
        {"type": "shell", "commands": (text,)},
        {"type": "file", "source": text, "destination": text},
    ]
    assert text in parse_manifest(json.dumps({"tasks": {text: {}}}).encode()).tasks
