"""Tests what a sample waits for before it begins, and what it is told of services that end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from provisioner.errors import CommandTimeoutError
from provisioner.inspect.configuration import Machine
from provisioner.inspect.losses import NotUpError
from provisioner.inspect.readiness import wait_until_ready
from provisioner.ssh.calls import Calls
from provisioner.ssh.exchange import Completed


@dataclass
class Machines:
    """Answers as a machine whose services end, one state after the other; the last stays.

    Args:
        states: how often each service has ended, and how.
        journal: of each.
        is_ready: whether `ready` succeeds in time.
    """

    states: list[dict[str, tuple[int, str]]]
    journal: bytes = b"Traceback\nModuleNotFoundError: flask\n"
    is_ready: bool = True
    seconds: float = 0.0
    asked: list[list[str]] = field(default_factory=list)

    def run(self, argv: list[str], **_: Any) -> Completed:
        """Runs a program."""
        self.asked.append(argv)
        if argv[0] == "journalctl":
            return Completed(0, self.journal, b"")
        if argv[0] == "bash":
            if not self.is_ready:
                raise CommandTimeoutError("late")
            return Completed(0, b"", b"")
        states = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        blocks = [f"Id={name}.service\nNRestarts={ends}\nResult={result}\n" for name, (ends, result) in states.items()]
        return Completed(0, "\n".join(blocks).encode(), b"")

    def pause(self) -> None:
        """Waits a moment."""
        self.seconds += 1


WEB = Machine(name="box", services=(("web", "python3 app.py"),))


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Callable[[Machine, Machines], list[str]]:
    """Waits for a machine, by a clock of its own."""

    def waited(machine: Machine, machines: Machines) -> list[str]:
        monkeypatch.setattr("provisioner.inspect.readiness.time.monotonic", lambda: machines.seconds)
        return wait_until_ready(machine, cast(Calls, machines), machines.pause)

    return waited


Wait = Callable[[Machine, Machines], list[str]]


def test_services_that_stay_up_are_not_waited_for(wait: Wait) -> None:
    machines = Machines([{"web": (0, "success")}])
    assert wait(WEB, machines) == []
    assert (machines.seconds, len(machines.asked)) == (0, 1)
    assert wait(Machine(), machines) == []
    assert len(machines.asked) == 1


def test_a_service_that_never_stays_up_is_an_error_with_its_last_words(wait: Wait) -> None:
    machines = Machines([{"web": (number, "exit-code")} for number in range(1, 200)])
    with pytest.raises(NotUpError, match="web of machine box has ended 61 times, and does not stay up") as caught:
        wait(WEB, machines)
    assert caught.value.details == "Traceback\nModuleNotFoundError: flask"


def test_a_service_that_has_ended_three_times_and_stays_up_is_told(wait: Wait) -> None:
    machines = Machines([{"web": (number, "exit-code")} for number in (1, 2, 3)])
    [note] = wait(WEB, machines)
    assert note.startswith("The service web of machine box has ended 3 times. It said last:\nTraceback\n")
    assert machines.seconds == 12


def test_a_service_that_runs_again_and_again_by_design_is_told(wait: Wait) -> None:
    machines = Machines([{"web": (number, "success")} for number in range(1, 200)])
    [note] = wait(WEB, machines)
    assert "has ended 61 times" in note


@pytest.mark.parametrize(("ready", "text"), [(8000, "exec 3<>/dev/tcp/127.0.0.1/8000"), ("test -e /x", "test -e /x")])
def test_the_sample_waits_for_what_the_configuration_says(wait: Wait, ready: int | str, text: str) -> None:
    machines = Machines([{"web": (4, "exit-code")}])
    [note] = wait(WEB.model_copy(update={"ready": ready}), machines)
    assert machines.asked[0][-1] == text
    assert "has ended 4 times" in note
    assert machines.seconds == 0


def test_a_machine_that_does_not_become_ready_is_an_error_with_its_services_last_words(wait: Wait) -> None:
    machines = Machines([{"web": (1, "exit-code"), "db": (0, "success")}], is_ready=False)
    machine = WEB.model_copy(update={"ready": 80, "services": (*WEB.services, ("db", "sleep 9d"))})
    with pytest.raises(NotUpError, match="box is not ready: nothing listens at port 80 after 300 s") as caught:
        wait(machine, machines)
    assert "The service web of machine box has ended 1 times:\nTraceback" in str(caught.value.details)
    assert "db" not in str(caught.value.details)


def test_what_a_machine_says_is_bounded_and_printable(wait: Wait) -> None:
    machines = Machines([{"web": (9, "exit-code")}], journal=b"\x1b]0;title\x07 words\n" * 4000)
    [note] = wait(WEB.model_copy(update={"ready": "true"}), machines)
    assert len(note) < 2200
    assert "\x1b" not in note
    for garbage in ("Id=web.service\nNRestarts=" + "9" * 5000, "Id=other.service\nNRestarts=7", "\n\n\n=\n\n", "\0"):
        machines.run = lambda argv, said=garbage, **_: Completed(0, said.encode(), b"")  # type: ignore[method-assign]
        assert wait(WEB, machines) == []


def test_the_port_is_a_number_of_a_port() -> None:
    assert Machine(ready=80).ready == 80
    for wrong in (0, 70000, True, 1.5):
        with pytest.raises(ValueError, match="ready"):
            Machine.model_validate({"ready": wrong})
