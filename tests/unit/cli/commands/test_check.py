"""`provisioner check` in text and JSON, and what the commands that create something make of the same mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from provisioner.base.errors import UnavailableError
from provisioner.clouds.registry import CLOUDS, CloudEntry
from tests.unit.conftest import CommandLine, nothing_was_created
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.family.families import GOOD, TASKS, VARIABLES, changed

TWICE = changed("def score(t, submission):", "def score(self, t, submission):")


def write(directory: Path, text: str = GOOD) -> str:
    root = directory / "fam"
    root.mkdir()
    (root / "fam.py").write_text(text)
    return str(root)


def test_a_family_without_mistakes(provisioner: CommandLine, tmp_path: Path) -> None:
    family = write(tmp_path)
    done = provisioner("check", family, "easy")
    assert (done.code, done.stdout, done.stderr) == (0, "fam: no errors, no warnings\n", "")
    assert provisioner("check", family, "--json").json == {
        "schema": 1, "ok": True, "family": "fam", "errors": 0, "warnings": 0, "tasks": ["easy", "hard"],
        "required_variables": [], "findings": [],
    }  # fmt: skip
    assert nothing_was_created(provisioner.home)


def test_an_error_has_place_reason_and_remedy_and_ends_with_2(provisioner: CommandLine, tmp_path: Path) -> None:
    family = write(tmp_path, TWICE)
    done = provisioner("check", family)
    assert done.code == 2
    first, why, fix, see, _, last = done.stdout.splitlines()
    assert first.startswith(f"{family}/fam.py:22: error: score(self, t, submission) cannot be called")
    assert first.endswith("[wrong-parameters]")
    assert why.startswith("    why: provisioner calls")
    assert fix.startswith("    do:  Write @staticmethod")
    assert see == "    see: docs/reference/family-checks.md#wrong-parameters"
    assert last == "fam: 1 error, no warnings"
    told = provisioner("check", family, "--json").json
    assert (told["ok"], told["errors"]) == (False, 1)
    assert told["findings"][0].keys() == {"level", "rule", "file", "line", "what", "why", "fix", "see"}
    assert (told["findings"][0]["file"], told["findings"][0]["line"]) == ("fam.py", 22)


def test_warnings_end_with_0(provisioner: CommandLine, tmp_path: Path) -> None:
    done = provisioner("check", write(tmp_path, changed("def start(t", "async def start(t")))
    assert done.code == 0
    assert done.stdout.endswith("fam: no errors, 1 warning\n")


def test_variables_are_named_or_compared_with_the_env_file(provisioner: CommandLine, tmp_path: Path) -> None:
    family = write(tmp_path, changed(VARIABLES, 'required_environment_variables = ["TOKEN", "KEY"]'))
    assert "Its tasks need --env-file with: TOKEN, KEY." in provisioner("check", family).stdout
    (tmp_path / "env").write_text("TOKEN=very-secret\n")
    done = provisioner("check", family, "--env-file", str(tmp_path / "env"))
    assert done.code == 2
    assert "variables are not set: KEY." in done.stdout
    assert "very-secret" not in done.stdout + done.stderr


def test_a_task_that_only_a_machine_can_tell_is_named(provisioner: CommandLine, tmp_path: Path) -> None:
    family = write(tmp_path, changed(TASKS, "return tasks()"))
    done = provisioner("check", family, "easy")
    assert (done.code, done.stdout.splitlines()[0]) == (
        0, "The family's text does not tell whether there is a task 'easy': building its image will.",
    )  # fmt: skip
    assert "whether" not in provisioner("check", family).stdout
    (tmp_path / "fam" / "fam.py").write_text("class TaskFamily(\n")
    assert "whether" not in provisioner("check", family, "easy").stdout


def test_an_env_file_among_the_familys_files_is_refused(provisioner: CommandLine, tmp_path: Path) -> None:
    family = write(tmp_path)
    (tmp_path / "fam" / "env").write_text("TOKEN=1\n")
    done = provisioner("check", family, "--env-file", f"{family}/env")
    assert done.code == 2
    assert "is one of the family's files" in done.stderr


COMMANDS = [
    ["run", "F", "easy", "--submission-file", __file__],
    ["up", "F", "easy"],
    ["test", "F", "easy"],
    ["image", "build", "F"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_what_surely_fails_is_refused_before_anything_is_created(
    provisioner: CommandLine, tmp_path: Path, command: list[str]
) -> None:
    family = write(tmp_path, TWICE)
    done = provisioner(*(family if word == "F" else word for word in command))
    assert done.code == 2
    assert "fam.py:22: score(self, t, submission) cannot be called" in done.stderr
    assert nothing_was_created(provisioner.home)


@pytest.mark.parametrize("command", [["plan", "F", "easy"], COMMANDS[0]], ids=lambda command: command[0])
def test_a_disk_that_no_host_has_is_refused_before_a_build(
    provisioner: CommandLine, tmp_path: Path, command: list[str]
) -> None:
    family = write(tmp_path)
    manifest = "tasks:\n  easy:\n    resources:\n      storage_gb: 1000000000\n"
    (tmp_path / "fam" / "manifest.yaml").write_text(manifest)
    done = provisioner(*(family if word == "F" else word for word in command))
    assert done.code == UnavailableError.exit_code
    assert "ask for 1000000000 GiB of disk" in done.stderr
    assert "storage_gb" in done.stderr
    assert nothing_was_created(provisioner.home)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_warnings_are_counted_and_where_to_read_them_said(
    provisioner: CommandLine, cloud: FakeCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setitem(CLOUDS, "local", CloudEntry(lambda *_: cloud, has_places=True, is_billed=False))
    cloud.terraform_fails()
    family = write(tmp_path, changed("def start(t", "async def start(t"))
    called = [family if word == "F" else word for word in command]
    assert provisioner(*called).stderr.count("fam has 1 warning: `provisioner check FAMILY` shows them") == 1
    # One that only the whole check finds counts as well.
    module = tmp_path / "fam" / "fam.py"
    module.write_text(f"import requests\n{module.read_text()}")
    assert "fam has 2 warnings: " in provisioner(*called).stderr
    assert "no errors, 2 warnings" in provisioner("check", family).stdout
    module.write_text(GOOD)
    assert "warning" not in provisioner(*called).stderr


def test_a_new_family_is_written_with_its_next_steps(provisioner: CommandLine, tmp_path: Path) -> None:
    family = tmp_path / "with space" / "sums"
    family.parent.mkdir()
    done = provisioner("new", str(family), "--aux", "--intermediate")
    assert done.code == 0
    assert f"{family}/sums.py" in done.stdout
    assert f"provisioner test '{family}' small" in done.stdout
    assert provisioner("check", str(family), "small").code == 0
    again = provisioner("new", str(family), "--json")
    assert (again.code, again.json["error"]["kind"]) == (2, "TaskFamilyError")
    told = provisioner("new", str(tmp_path / "other"), "--json").json
    assert told["files"] == ["README.md", "manifest.yaml", "other.py", "test_other.py"]
    assert (told["family"], told["directory"]) == ("other", str(tmp_path / "other"))
    assert nothing_was_created(provisioner.home)
