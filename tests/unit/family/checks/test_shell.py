"""The shells' own word on build steps: what they cannot read is found, with its place, and nothing is run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from provisioner.family.checks import shell
from provisioner.family.checks.shell import Script, syntax_problem
from tests.unit.family.checks.families import GOOD, checked, found

AUX = """
    @staticmethod
    def get_aux_vm_spec(t):
        return {
            "cpu_count_range": (1, 2),
            "ram_gib_range": (1, 2),
            "build_steps": [
                {
                    "type": "shell",
                    "commands": [
                        "echo 1",
                        %s,
                    ],
                },
            ],
        }
"""


def script(*commands: str, shell: str = "bash") -> Script:
    return Script("build_steps.json", commands, shell, certain=True)


def steps(*commands: str) -> dict[str, str]:
    return {"build_steps.json": json.dumps([{"type": "shell", "commands": ["true", *commands]}], indent=2)}


@pytest.mark.parametrize(
    "commands",
    [
        ("if true", "then echo yes", "fi"),
        ("cat > a <<'END'", "(((", "END"),
        ("x=(1 2)", "[[ a =~ b ]]", "echo ${x[@]}"),
        ("exit 1",),
        ("not-a-program --at-all",),
        ("# nothing",),
        ("echo 'ü\udcff'",),
    ],
    ids=["over lines", "here document", "bash alone", "exit", "unknown program", "comment", "not UTF-8"],
)
def test_what_the_shell_can_read_is_fine(commands: tuple[str, ...]) -> None:
    assert syntax_problem(script(*commands)) is None


@pytest.mark.parametrize(
    ("commands", "line"),
    [
        (("echo 1", "if true"), None),
        (("echo 1", "echo ("), 2),
        (("echo 1", "echo 'open"), 2),
        (("a\nb\nfi", "c"), 3),
        (("echo $(", "ls"), None),
    ],
    ids=["no fi", "bracket", "quote", "inside a command", "substitution"],
)
def test_what_it_cannot_read_is_said_in_its_words(commands: tuple[str, ...], line: int | None) -> None:
    problem = syntax_problem(script(*commands))
    assert problem
    # Of what never ends, some shells name the line behind the end, and others none.
    assert problem[0] == line if line else problem[0] in (None, len(commands) + 1)
    assert "unexpected" in problem[1]


def test_an_aux_vms_steps_are_read_by_its_own_shell() -> None:
    assert syntax_problem(script("x=(1 2)", shell="sh"))
    assert syntax_problem(script("x=(1 2)")) is None


def test_nothing_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    tmp_path.chmod(0o777)
    for command in (
        f"touch {mark}",
        f"echo $(touch {mark})",
        f": > {mark}",
        f"set +n\ntouch {mark}",
        f"x=`touch {mark}`",
    ):
        assert syntax_problem(script(command)) is None
    assert not mark.exists()


def test_a_shell_that_runs_out_of_memory_or_time_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "MEMORY_LIMIT_BYTES", 1 << 20)
    assert syntax_problem(script("echo (")) is None
    monkeypatch.undo()
    monkeypatch.setattr(shell, "TIME_LIMIT_SECONDS", 0)
    assert syntax_problem(script("echo (")) is None


def test_where_there_is_no_such_shell_nothing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert syntax_problem(script("echo (")) is None


def test_a_build_step_that_bash_cannot_read_is_an_error(tmp_path: Path) -> None:
    result = checked(tmp_path, files=steps("echo (", "echo 2"))
    assert found(result) == ["error shell-syntax build_steps.json:6"]
    assert "syntax error near unexpected token" in result.findings[0].what


@pytest.mark.parametrize("command", ["exit 0", "shopt -s extglob", "alias x=y", "exec sh other"])
def test_a_script_that_may_be_right_all_the_same_is_a_warning(tmp_path: Path, command: str) -> None:
    assert found(checked(tmp_path, files=steps(command, "echo (")))[0].startswith("warning shell-syntax")


def test_an_aux_vms_build_step_has_its_place_in_the_module(tmp_path: Path) -> None:
    assert found(checked(tmp_path, GOOD + AUX % '"x=(1 2)"')) == ["error shell-syntax fam.py:39"]
    assert found(checked(tmp_path, GOOD + AUX % '"echo 2"')) == []


def test_a_step_that_may_never_run_is_a_warning(tmp_path: Path) -> None:
    text = (GOOD + AUX % '"x=(1 2)"').replace("(1, 2),", "range(t),", 1)
    assert found(checked(tmp_path, text)) == ["warning shell-syntax fam.py:39"]


def test_very_many_steps_are_not_all_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "MAXIMUM_STEPS", 3)
    many = [{"type": "shell", "commands": ["echo ("]}] * 4
    rules = {finding.rule for finding in checked(tmp_path, files={"build_steps.json": json.dumps(many)}).findings}
    assert rules == {"shell-syntax", "not-checked"}
