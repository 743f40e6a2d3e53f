"""Tests the package metr_task_standard as a family's tests use it, alone and by the helper's operation `pytest`."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from provisioner.clouds.guest_files import GUEST
from tests.unit.guest.machine_directory import Answer, Machine
from tests.waiting import BOUND_SECONDS

TESTS = """
import os
import pytest

def test_fixtures(task_family, task_name, task):
    assert task_family.__name__ == "TaskFamily"
    assert task_name == "main"
    assert task == {"word": "abandon"}

@pytest.mark.task_standard_tasks(["main", "other"])
def test_for_this_task():
    assert os.environ["TOKEN"] == "t"

@pytest.mark.task_standard_tasks(["other"])
def test_for_another_task():
    assert False
"""


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Returns a machine with a family and with our package installed."""
    machine = Machine(tmp_path)
    machine.write_family("")
    for source in GUEST.glob("metr_task_standard*"):
        shutil.copytree(source, packages(machine) / source.name, ignore=shutil.ignore_patterns("__pycache__"))
    return machine


def packages(machine: Machine) -> Path:
    """Returns the directory that serves as the machine's dist-packages."""
    return machine.root / "dist-packages"


def run_tests(machine: Machine, tests: str, *arguments: str) -> Answer:
    """Run a family's tests through the helper."""
    (machine.family / "fam_test.py").write_text(tests)
    environment = {"PYTHONPATH": str(packages(machine)), "TOKEN": "t"}
    return machine.run("pytest", arguments=list(arguments), environment=environment)


def run_pytest(machine: Machine, tests: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest as a person would, without -p: the plugin comes in by its entry point."""
    (machine.family / "fam_test.py").write_text(tests)
    return subprocess.run(
        [sys.executable, "-B", "-m", "pytest", *arguments],
        cwd=machine.family,
        env={"PYTHONPATH": str(packages(machine)), "TOKEN": "t"},
        capture_output=True,
        text=True,
        timeout=BOUND_SECONDS,
        check=False,
    )


def test_a_familys_tests_get_fixtures_and_variables(machine: Machine) -> None:
    answer = run_tests(machine, TESTS, "-rs", "--strict-markers")
    assert answer.value == {"exit_code": 0}, answer.stdout
    assert "2 passed, 1 skipped" in answer.stdout
    assert "for the tasks other, not for 'main'" in answer.stdout


def test_the_exit_code_is_pytests(machine: Machine) -> None:
    assert run_tests(machine, "def test_it():\n    assert False\n").value == {"exit_code": 1}
    assert run_tests(machine, TESTS, "--no-such-option").value == {"exit_code": 4}


def test_a_family_without_tests_has_pytests_exit_code_for_that(machine: Machine) -> None:
    answer = machine.run("pytest", arguments=[])
    assert answer.value == {"exit_code": 5}
    assert "no tests" in answer.stdout


def test_a_machine_without_pytest_says_so(machine: Machine) -> None:
    venv.create(machine.root / "venv", with_pip=False, symlinks=True)
    machine.python = str(machine.root / "venv/bin/python")
    machine.path = str(machine.root / "venv/bin")
    assert "pytest is not installed" in run_tests(machine, TESTS).result["message"]


def test_the_plugin_is_found_by_its_entry_point(machine: Machine) -> None:
    options = ("--task-standard-task-family-name", "fam", "--task-standard-task-name", "main")
    ended = run_pytest(machine, TESTS, "--strict-markers", *options)
    assert "2 passed, 1 skipped" in ended.stdout, ended.stdout + ended.stderr


def test_fixtures_without_the_options_say_which_is_missing(machine: Machine) -> None:
    ended = run_pytest(machine, TESTS)
    assert ended.returncode == 1
    assert "pytest was not given --task-standard-task-family-name" in ended.stdout


def test_the_types_are_importable_from_both_places(machine: Machine) -> None:
    names = "FileBuildStep, GPUSpec, ShellBuildStep, VMSpec"
    answer = run_tests(
        machine,
        f"from metr_task_standard import {names}\nfrom metr_task_standard.types import {names}\n"
        "def test_it():\n    assert VMSpec(cpu_count_range=(1, 2), ram_gib_range=(1, 2))\n",
    )
    assert answer.value == {"exit_code": 0}, answer.stdout
