"""A machine that boots lets some connections wait for seconds: others are tried meanwhile."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from pathlib import Path

import pytest

from provisioner.base.errors import MachineLostError
from provisioner.base.models import Endpoint
from provisioner.ssh import connection as module
from provisioner.ssh.connection import answering_socket
from provisioner.ssh.keys import Login
from tests.unit.fakes.clock import WaitingClock
from tests.waiting import BOUND_SECONDS

BANNER = b"SSH-2.0-x\r\n"


def connect(answers: list[bytes | None], seconds: float = BOUND_SECONDS, boots: bool = True) -> bytes:
    """Connects to a server; returns the first line of the connection that was chosen.

    Args:
        answers: what each connection gets; None: nothing, for as long as it is there.
        seconds: how long an answer is waited for.
        boots: whether the machine may still be booting.
    """
    streams: list[socket.socket] = []
    with contextlib.ExitStack() as stack, socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):  # the test is over, and has closed the sockets
                for answer in answers:
                    stream = stack.enter_context(listener.accept()[0])
                    streams.append(stream)
                    if answer is not None:
                        stream.sendall(answer)
                        stream.shutdown(socket.SHUT_WR)

        threading.Thread(target=serve, daemon=True).start()
        endpoint = Endpoint(host="127.0.0.1", port=listener.getsockname()[1])
        login = Login(endpoint, "root", Path("/nonexistent"), "ssh-ed25519 key")
        deadline = time.monotonic() + seconds
        with answering_socket(login, deadline, lambda: True, "machine", boots) as chosen:
            assert chosen.gettimeout() is None
            return chosen.recv(100)


@pytest.mark.parametrize(
    "before",
    [[None], [None, b"", b"", None], [b"", b"Exceeded MaxStartups\r\n"]],
    ids=["silence", "silence and refusals", "too many"],
)
def test_a_waiting_connection_does_not_block_another_attempt(before: list[bytes | None]) -> None:
    assert connect([*before, BANNER]) == BANNER


@pytest.mark.parametrize("refusal", [b"", b"Exceeded MaxStartups\r\n"], ids=["refused", "too many"])
def test_a_machine_that_is_up_and_refuses_is_soon_asked_again(monkeypatch: pytest.MonkeyPatch, refusal: bytes) -> None:
    monkeypatch.setattr(module, "LONGEST_PAUSE_SECONDS", 2 * BOUND_SECONDS)
    assert connect([refusal, refusal, BANNER], boots=False) == BANNER


def test_connections_that_are_left_waiting_are_given_up_in_time() -> None:
    with pytest.raises(MachineLostError, match="did not answer in time"):
        connect([None, None], seconds=1)


@pytest.mark.parametrize(
    ("boots", "attempts"),
    [
        pytest.param(True, 5, id="booting: after 0, 0.7, 2.1, 4.9 and 10.5 s"),
        pytest.param(False, 2, id="up: after 0 and 8 s"),
    ],
)
def test_a_slow_machine_does_not_get_more_and_more_work(
    monkeypatch: pytest.MonkeyPatch, boots: bool, attempts: int
) -> None:
    clock = WaitingClock()
    monkeypatch.setattr(module, "time", clock)
    tried: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = Endpoint(host="127.0.0.1", port=listener.getsockname()[1])
        login = Login(endpoint, "root", Path("/nonexistent"), "ssh-ed25519 key")
        with pytest.raises(MachineLostError):
            answering_socket(login, 12, lambda: True, "machine", boots)
        listener.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                tried.append(listener.accept()[0])
    for stream in tried:
        stream.close()
    assert len(tried) == attempts
