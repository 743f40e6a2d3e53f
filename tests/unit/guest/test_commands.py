"""Tests the helper's operation `shell`, which runs build steps."""

from __future__ import annotations

from tests.unit.guest.machine_directory import Machine


def test_commands_run_as_one_script_that_stops_at_the_first_failure(machine: Machine) -> None:
    commands = ["word=hello", "cat", 'echo "$word $TOKEN"', "echo gone > /dev/stderr", "false | true", "echo never"]

    answer = machine.run(
        "shell",
        commands=commands,
        shell=["bash", "-euo", "pipefail"],
        cwd=str(machine.home),
        user=None,
        environment={"TOKEN": "it's"},
    )

    assert answer.stdout == "hello it's\n"
    assert answer.stderr == "gone\n"
    assert (answer.result["kind"], answer.result["exit_code"]) == ("exit", 1)


def test_commands_run_as_the_named_user_in_its_home(machine: Machine) -> None:
    answer = machine.run(
        "shell",
        commands=["id -u", "pwd", "echo $HOME $USER", "echo seen > /dev/stderr"],
        shell=["/bin/sh", "-e"],
        cwd="/",
        user="agent",
    )

    assert answer.value is None
    assert answer.stdout == f"{machine.agent_uid}\n/\n{machine.home} agent\n"
    assert answer.stderr == "seen\n"


def test_secrets_stand_in_no_command_line(machine: Machine) -> None:
    answer = machine.run(
        "shell",
        commands=["cat /proc/[0-9]*/cmdline | tr '\\0' ' '"],
        shell=["/bin/sh"],
        cwd="/",
        user=None,
        environment={"TOKEN": "hunter2-" + "x"},
    )

    assert "helper.py child" in answer.stdout
    assert "hunter2-x" not in answer.stdout
