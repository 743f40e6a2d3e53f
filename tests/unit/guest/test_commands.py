"""Tests the helper's operation `shell`, which runs build steps."""

from __future__ import annotations

import subprocess
from typing import Any

from tests.unit.guest.machine_directory import Answer, Machine
from tests.waiting import until


def shell(machine: Machine, *commands: str, **keys: Any) -> Answer:
    """Runs commands as root in / by sh, unless the keys say otherwise."""
    return machine.run("shell", **{"commands": commands, "shell": ["/bin/sh"], "cwd": "/", "user": None, **keys})


def test_commands_stop_at_the_first_failure(machine: Machine) -> None:
    commands = ["word=hello", "cat", 'echo "$word $TOKEN"', "echo gone > /dev/stderr", "false | true", "echo never"]
    where: dict[str, Any] = {"shell": ["bash", "-euo", "pipefail"], "cwd": str(machine.home)}
    answer = shell(machine, *commands, **where, environment={"TOKEN": "it's"})
    assert (answer.stdout, answer.stderr) == ("hello it's\n", "gone\n")
    assert (answer.result["kind"], answer.result["exit_code"]) == ("exit", 1)


def test_commands_run_as_the_named_user_in_its_home(machine: Machine) -> None:
    commands = ["id -u", "pwd", "echo $HOME $USER", "echo seen > /dev/stderr"]
    answer = shell(machine, *commands, shell=["/bin/sh", "-e"], user="agent")
    assert answer.value is None
    assert answer.stdout == f"{machine.agent_uid}\n/\n{machine.home} agent\n"
    assert answer.stderr == "seen\n"


def test_secrets_stand_in_no_command_line(machine: Machine) -> None:
    listing = "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"
    answer = shell(machine, listing, environment={"TOKEN": "hunter2-" + "x"})
    assert "guest/helper.py" in answer.stdout
    assert "hunter2-x" not in answer.stdout


def test_slow_commands_are_killed_with_their_children(machine: Machine) -> None:
    marked, listing = "sleep 1000.125", ["ps", "-eo", "args"]
    answer = shell(machine, "echo begun", f"{marked} & sleep 60", timeout_seconds=1)
    assert answer.result["kind"] == "timeout"
    assert answer.stdout in ("begun\n", "")  # a busy host may not get so far in this time
    until(lambda: marked not in subprocess.run(listing, capture_output=True, text=True, check=True).stdout)


def test_commands_get_their_own_session_input_and_variables(machine: Machine) -> None:
    commands = ["cut -d' ' -f4-6 /proc/$$/stat", "readlink /proc/self/fd/0", "umask", "env"]
    answer = shell(machine, *commands, environment={"TOKEN": "given"})
    ids, stdin, mask, *variables = answer.stdout.splitlines()
    parent, group, session = ids.split()
    assert parent == group == session
    assert (stdin, mask) == ("/dev/null", "0022")
    assert "TOKEN=given" in variables
    assert not [variable for variable in variables if variable.startswith("LEAKED")]


def test_a_machine_without_the_familys_directory_is_an_error(machine: Machine) -> None:
    machine.family.rmdir()
    result = shell(machine, "true").result
    assert (result["kind"], "root" in result["message"]) == ("invalid", True)
