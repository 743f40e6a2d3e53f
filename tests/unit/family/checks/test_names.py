"""Names of tasks and variables, where the family has them as literals."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.family.checks.families import TASKS, VARIABLES, changed, checked, found

AUX = """\
    @staticmethod
    def get_aux_vm_spec(t):
        return None
"""


def variables(value: str) -> str:
    return changed(VARIABLES, f"required_environment_variables = {value}")


def test_a_task_is_compared_with_those_that_are_literals(tmp_path: Path) -> None:
    assert found(checked(tmp_path, task="easy")) == []
    result = checked(tmp_path, task="easyy")
    assert found(result) == ["error unknown-task fam.py:6"]
    assert "'easy'" in result.findings[0].fix
    assert found(checked(tmp_path, changed(TASKS, "return {x: 1 for x in y}"), task="easyy")) == []


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
    assert (found(without_file), without_file.needs) == ([], ("B", "A"))


@pytest.mark.parametrize(
    ("value", "needs"),
    [('("A",)', ("A",)), ('{"A"}', ("A",)), ("[f(x)]", ()), ('["A"] + MORE', ()), ('"A"', ())],
    ids=["tuple", "set", "call", "sum", "string"],
)
def test_variables_are_known_if_they_are_literals(tmp_path: Path, value: str, needs: tuple[str, ...]) -> None:
    result = checked(tmp_path, variables(value))
    assert (result.needs, found(result)) == (needs, [])


def test_a_required_variable_that_is_empty_is_warned_of(tmp_path: Path) -> None:
    result = checked(tmp_path, variables('["A", "B"]'), variables={"A": "1", "B": "", "C": ""})
    assert found(result) == ["warning empty-variable fam.py:3"]
    assert result.findings[0].what.endswith("empty: B.")
    # provisioner sets this one, whatever the env file says.
    address = {"VM_IP_ADDRESS": ""}
    assert found(checked(tmp_path, variables('["VM_IP_ADDRESS"]') + AUX, variables=address)) == []
