"""Tasks, variables, permissions, aux VM and version, where the family writes them out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.family.checks.families import GOOD, TASKS, VARIABLES, changed, checked, found

PERMISSIONS = "def get_permissions(t):\n        return []"
AUX = """\
    @staticmethod
    def get_aux_vm_spec(t):
        return {"cpu_count_range": (1, 2), "ram_gib_range": [1, 2]}
"""


def variables(value: str) -> str:
    return changed(VARIABLES, f"required_environment_variables = {value}")


def permissions(value: str) -> str:
    return changed(PERMISSIONS, PERMISSIONS.replace("[]", value))


FINE = {
    "variables": variables('["A", "B"]'),
    "variables in a tuple": variables('("A",)'),
    "variables in a set": variables('{"A"}'),
    "computed variables": variables("[f(x)]"),
    "added variables": variables('["A"] + MORE'),
    "internet": permissions('["full_internet"]'),
    "permissions in a tuple": permissions('("full_internet",)'),
    "computed permissions": permissions('["full_internet"] if t else []'),
    "aux VM": GOOD + AUX,
    "no aux VM": GOOD + AUX.replace('{"cpu_count_range": (1, 2), "ram_gib_range": [1, 2]}', "None"),
    "computed aux VM": GOOD + AUX.replace("(1, 2)", "range(9)"),
    "version": changed("0.5.0", "0.3"),
    "computed version": changed('"0.5.0"', "VERSION"),
}
WRONG = {
    "string of variables": (variables('"A"'), "error invalid-variable fam.py:3"),
    "no variable's name": (variables('["A", "A=1"]'), "error invalid-variable fam.py:3"),
    "misspelt permission": (permissions('["internet"]'), "error invalid-permissions fam.py:11"),
    "twice the permission": (permissions('["full_internet", "full_internet"]'), "error invalid-permissions fam.py:11"),
    "string of permissions": (permissions('"full_internet"'), "error invalid-permissions fam.py:11"),
    "no permission": (permissions("None"), "error invalid-permissions fam.py:11"),
    "aux VM without memory": (GOOD + AUX.replace("ram_gib_range", "ram"), "error invalid-aux-vm fam.py:29"),
    "reversed range": (GOOD + AUX.replace("(1, 2)", "(2, 1)"), "error invalid-aux-vm fam.py:29"),
    "no task": (changed(TASKS, "return {}"), "error invalid-tasks fam.py:6"),
    "empty name": (changed('"easy"', '" "'), "error invalid-tasks fam.py:6"),
    "task twice": (changed(TASKS, 'return {\n"a": 1,\n"b": 2,\n"a": 3}'), "warning duplicate-task fam.py:8"),
    "version to come": (changed("0.5.0", "1.0"), "warning standard-version fam.py:2"),
    "number": (changed('"0.5.0"', "0.5"), "warning standard-version fam.py:2"),
    "no version": (changed('    standard_version = "0.5.0"\n', ""), "warning standard-version fam.py:1"),
}


@pytest.mark.parametrize("name", FINE)
def test_nothing_is_said_of_what_is_allowed_or_computed(tmp_path: Path, name: str) -> None:
    assert found(checked(tmp_path, FINE[name])) == []


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused_later_is_found(tmp_path: Path, name: str) -> None:
    text, finding = WRONG[name]
    assert found(checked(tmp_path, text)) == [finding]


def test_a_task_is_compared_with_those_that_are_written_out(tmp_path: Path) -> None:
    assert found(checked(tmp_path, task="easy")) == []
    result = checked(tmp_path, task="easyy")
    assert found(result) == ["error unknown-task fam.py:6"]
    assert "'easy'" in result.findings[0].fix
    assert found(checked(tmp_path, changed(TASKS, "return {x: 1 for x in y}"), task="easyy")) == []


@pytest.mark.parametrize(
    ("constant", "returned", "tasks"),
    [
        ('NAMES = ("one", "two")', "{name: {} for name in NAMES}", ("one", "two")),
        ('NAMES = {"one": 1, "two": 2}', "{name: NAMES[name] for name in NAMES}", ("one", "two")),
        ("", '{name: {} for name in ["one", "two"]}', ("one", "two")),
        ('NAMES = ["one"]', "{name: {} for name in NAMES if name}", None),
        ('NAMES = ["one"]', "{name + '_': {} for name in NAMES}", None),
        ('NAMES = ["one"]', "{name: {} for name in NAMES for other in NAMES}", None),
        ('NAMES = ["one"]\nNAMES.append("two")', "{name: {} for name in NAMES}", None),
        ('NAMES = ["one"] + MORE', "{name: {} for name in NAMES}", None),
    ],
)
def test_names_are_known_where_each_of_a_written_list_has_a_task(
    tmp_path: Path, constant: str, returned: str, tasks: tuple[str, ...] | None
) -> None:
    result = checked(tmp_path, f"{constant}\n{changed(TASKS, f'return {returned}')}")
    assert (result.written.tasks, found(result)) == (tasks, [])


def test_variables_are_known_by_constants(tmp_path: Path) -> None:
    text = f'NAMES = ["A", "B"]\n{variables("NAMES")}'
    assert checked(tmp_path, text).written.needs == ("A", "B")
    assert checked(tmp_path, f"{text}NAMES.append('C')\n").written.needs == ()


def test_the_manifests_tasks_are_compared(tmp_path: Path) -> None:
    manifest = {"manifest.yaml": "tasks:\n  hard: {}\n  'esay':\n    version: '1'\n"}
    assert found(checked(tmp_path, files=manifest)) == ["warning unknown-manifest-task manifest.yaml:3"]
    assert found(checked(tmp_path, changed(TASKS, "return tasks()"), manifest)) == []


def test_variables_are_compared_with_the_env_file(tmp_path: Path) -> None:
    text = variables('["B", "A", "B", "VM_IP_ADDRESS"]')
    result = checked(tmp_path, text + AUX, variables={"A": "1"})
    assert found(result) == ["error missing-variable fam.py:3"]
    assert result.findings[0].what.endswith("not set: B.")
    assert found(checked(tmp_path, text + AUX, variables={"A": "1", "B": "2"})) == []
    # provisioner supplies the third only where there is an aux VM.
    assert found(checked(tmp_path, text, variables={"A": "1", "B": "2"})) == ["error missing-variable fam.py:3"]
    without_file = checked(tmp_path, text + AUX)
    assert (found(without_file), without_file.written.needs) == ([], ("B", "A"))


def test_a_required_variable_that_is_empty_is_warned_of(tmp_path: Path) -> None:
    result = checked(tmp_path, variables('["A", "B"]'), variables={"A": "1", "B": "", "C": ""})
    assert found(result) == ["warning empty-variable fam.py:3"]
    assert result.findings[0].what.endswith("empty: B.")
    # provisioner sets this one, whatever the env file says.
    address = {"VM_IP_ADDRESS": ""}
    assert found(checked(tmp_path, variables('["VM_IP_ADDRESS"]') + AUX, variables=address)) == []


def test_a_file_that_an_aux_vm_copies_must_exist(tmp_path: Path) -> None:
    steps = '"build_steps": [{"type": "file", "source": "a", "destination": "a"}], "cpu_count_range"'
    text = GOOD + AUX.replace('"cpu_count_range"', steps)
    assert found(checked(tmp_path, text)) == ["error invalid-aux-vm fam.py:29"]
    assert found(checked(tmp_path, text, {"a": ""})) == []
