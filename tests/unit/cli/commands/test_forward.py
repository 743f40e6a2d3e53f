"""Tests the command `forward` on a fake cloud whose machines answer over SSH."""

from __future__ import annotations

import re
import socket
import threading

import pytest

from provisioner.cli.commands import forward
from provisioner.cli.commands.forward import parse_ports
from provisioner.errors import UsageError
from provisioner.models import Environment
from provisioner.session import Session
from provisioner.ssh.forwarding import Forwarder
from tests.ports import reserved_port
from tests.unit.conftest import CommandLine
from tests.unit.fakes.world import environment, up
from tests.unit.ssh.test_forwarding import echo, service
from tests.waiting import BOUND_SECONDS


@pytest.fixture
def running(session: Session, monkeypatch: pytest.MonkeyPatch) -> Environment:
    running = up(session, environment())
    monkeypatch.setattr(forward, "environment_session", lambda _: (session, running))
    return running


@pytest.mark.parametrize("local", ["", "chosen"])
def test_the_printed_address_reaches_the_machine(
    provisioner: CommandLine, running: Environment, monkeypatch: pytest.MonkeyPatch, local: str
) -> None:
    answers: list[bytes] = []

    def interrupt(self: Forwarder, _: object) -> None:
        """Plays an operator, who uses the port and presses Ctrl-C."""
        with socket.create_connection(self._listener.getsockname(), timeout=BOUND_SECONDS) as client:
            client.sendall(b"hello")
            answers.append(client.recv(100))
        raise KeyboardInterrupt

    monkeypatch.setattr(Forwarder, "wait", interrupt)
    with service(echo) as port, reserved_port() as chosen:
        done = provisioner("forward", running.id, f"{port}:{chosen}" if local else str(port))
    assert (done.code, answers) == (130, [b"hello"])
    match = re.fullmatch(
        rf"127\.0\.0\.1:(\d+) is port {port} of the primary machine of {running.id}; Ctrl-C ends\n", done.stdout
    )
    assert match
    assert not local or int(match[1]) == chosen
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(match[1])))
    assert not [thread for thread in threading.enumerate() if thread.name == "forward"]


def test_a_port_that_is_taken_here_is_named(provisioner: CommandLine, running: Environment) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = provisioner("forward", running.id, f"80:{port}")
    assert (done.code, done.stdout) == (3, "")
    assert f"Port {port} of this host cannot be opened: Address already in use" in done.stderr


@pytest.mark.parametrize(("text", "ports"), [("80", (80, None)), ("80:8080", (80, 8080)), ("65535:1", (65535, 1))])
def test_ports_are_one_or_two_numbers(text: str, ports: tuple[int, int | None]) -> None:
    assert parse_ports(text) == ports


@pytest.mark.parametrize(
    "text", ["", "0", "80:0", "65536", "80:", ":80", "80:80:80", "-1", "٨٠", "8 0", "80\n"],
    ids=["empty", "zero", "zero here", "high", "half", "other half", "three", "negative", "digits", "space", "line"],
)  # fmt: skip
def test_other_ports_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="must be PORT or PORT:LOCAL"):
        parse_ports(text)
