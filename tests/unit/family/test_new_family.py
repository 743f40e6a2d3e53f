"""A new family: a working one in every form, under a name that is allowed, and never in place of anything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from provisioner.base.errors import TaskFamilyError
from provisioner.family.check import check_family
from provisioner.family.loader import load_family
from provisioner.family.new_family import write_family
from tests.command_line import ROOT
from tests.waiting import BOUND_SECONDS

FORMS = [(False, False), (True, False), (False, True), (True, True)]


@pytest.mark.parametrize(("aux", "intermediate"), FORMS)
def test_what_is_written_has_no_mistakes_and_its_tasks_are_known(tmp_path: Path, aux: bool, intermediate: bool) -> None:
    files = write_family(tmp_path / "sums", aux=aux, intermediate=intermediate)
    checked = check_family(tmp_path / "sums", "small")
    assert (checked.findings, checked.tasks, checked.needs) == ((), ("small", "large"), ())
    family = load_family(tmp_path / "sums")
    assert family.files == files
    assert ("aux/number.txt" in files) == aux
    assert set(family.manifest.tasks) == {"small", "large"}
    text = family.module.read_text()
    assert ("get_aux_vm_spec" in text, "intermediate_score" in text) == (aux, intermediate)


@pytest.mark.parametrize(("aux", "intermediate"), FORMS)
def test_what_is_written_is_formatted_and_free_of_faults(tmp_path: Path, aux: bool, intermediate: bool) -> None:
    write_family(tmp_path / "sums", aux=aux, intermediate=intermediate)
    rules = ["--isolated", "--line-length", "120"]
    select = ["--select", "E,F,W,I,UP,B,SIM,C4,PIE,RET"]
    for command in (["check", *rules, *select], ["format", "--check", *rules]):
        subprocess.run(
            [sys.executable, "-m", "ruff", *command, str(tmp_path / "sums")], check=True, timeout=BOUND_SECONDS
        )


def test_its_own_tests_pass(tmp_path: Path) -> None:
    write_family(tmp_path / "sums", aux=False, intermediate=False)
    plugins = ["-p", "metr-task-standard", "-p", "no:cacheprovider"]
    options = [*plugins, "--task-standard-task-family-name=sums"]
    for task in ("small", "large"):
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", *options, f"--task-standard-task-name={task}"],
            cwd=tmp_path / "sums", check=True, timeout=BOUND_SECONDS,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT / "provisioner" / "guest")},
        )  # fmt: skip


def test_the_agents_file_is_read_without_secrets(tmp_path: Path) -> None:
    write_family(tmp_path / "sums", aux=False, intermediate=True)
    programs = recorder(tmp_path, "42")
    program = "import sums; print(sums.TaskFamily.intermediate_score({'a': 19, 'b': 23}))"
    done = subprocess.run(
        [sys.executable, "-B", "-c", program], cwd=tmp_path / "sums", capture_output=True, text=True, check=True,
        timeout=BOUND_SECONDS, env={"PATH": str(programs), "TOKEN": "very-secret"},
    )  # fmt: skip
    assert "'sum': 'right'" in done.stdout
    assert "very-secret" not in (tmp_path / "seen").read_text()


def recorder(directory: Path, says: str = "") -> Path:
    """A runuser that writes its environment to `seen`; returns the directory that it is in."""
    runuser = directory / "bin" / "runuser"
    runuser.parent.mkdir()
    runuser.write_text(f"#!/bin/sh\n/usr/bin/env > {directory}/seen\necho {says}\n")
    runuser.chmod(0o755)
    return runuser.parent


AS_AGENT = {
    "new": "import test_sums; test_sums.test_the_agent_reaches_the_number()",
    "guestbook": "import test_guestbook as t; t.as_agent('id')",
    "container_escape": "import test_container_escape as t; t.in_container('id')",
    "number_guess": "import number_guess; number_guess._read_guess()",
}


@pytest.mark.parametrize("name", AS_AGENT)
def test_new_families_run_agents_without_secrets(tmp_path: Path, name: str) -> None:
    if name == "new":
        write_family(tmp_path / "sums", aux=True, intermediate=False)
    programs = recorder(tmp_path)
    directory = tmp_path / "sums" if name == "new" else ROOT / "examples" / name
    # The number that the new family's test compares is not here: it fails once it has asked as agent.
    subprocess.run(
        [sys.executable, "-B", "-c", AS_AGENT[name]], cwd=directory, capture_output=True, timeout=BOUND_SECONDS,
        check=False,
        env={"PATH": str(programs), "PYTHONPATH": str(ROOT / "provisioner" / "guest"), "TOKEN": "very-secret"},
    )  # fmt: skip
    seen = (tmp_path / "seen").read_text()
    assert "PATH=" in seen
    assert "very-secret" not in seen


@pytest.mark.parametrize("kind", ["directory", "file", "link", "dangling link"])
def test_nothing_is_written_where_something_exists(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "sums"
    if kind == "directory":
        path.mkdir()
    elif kind == "file":
        path.touch()
    else:
        path.symlink_to(tmp_path if kind == "link" else tmp_path / "nothing")
    with pytest.raises(TaskFamilyError, match="exists already"):
        write_family(path, aux=True, intermediate=True)
    assert [each.name for each in tmp_path.rglob("*")] == ["sums"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Sums", "is not a valid family name"),
        ("two words", "is not a valid family name"),
        ("s" * 65, "has over 64 characters"),
        ("json", "would hide Python's own"),
        ("class", "would hide Python's own"),
        ("pytest", "would hide Python's own"),
        ("test_sums", "would take its module for tests"),
        ("sums_test", "would take its module for tests"),
        ("nowhere/sums", "cannot be created: No such file"),
        ("{{sums}}", "is not a valid family name"),
    ],
)
def test_a_name_that_no_family_may_have_is_refused(tmp_path: Path, name: str, says: str) -> None:
    with pytest.raises(TaskFamilyError, match=says):
        write_family(tmp_path / name, aux=False, intermediate=False)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_of_a_family_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(TaskFamilyError, match="cannot be written: No space left on device"):
        write_family(tmp_path / "sums", aux=False, intermediate=False)
    assert list(tmp_path.iterdir()) == []


def test_the_service_of_the_aux_vm_serves_what_score_reads() -> None:
    service = (ROOT / "templates" / "family" / "aux" / "number.service").read_text()
    assert "--directory /srv/number" in service
    assert "http.server 8000" in service
    assert (ROOT / "templates" / "family" / "aux" / "number.txt").read_text() == "23\n"
