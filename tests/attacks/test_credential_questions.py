"""Root in a machine asks on its credential port without end, sends what was not asked for, or takes no answer.

What the host does for it stays bounded, and the watchdog, which answers, continues its work.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from provisioner.clouds.local.vm import credential_port
from provisioner.clouds.local.vm.credential_port import CredentialPort
from tests.unit.fakes.clock import WaitingClock
from tests.unit.fakes.port import connected


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[CredentialPort, socket.socket]]:
    """The host's end of a port, and the hostile machine's."""
    (tmp_path / "credentials").mkdir()
    (tmp_path / "credentials" / "hosts").write_text("192.0.2.1 name\n" * 40_000)
    with connected(tmp_path) as (port, theirs):
        theirs.setblocking(False)
        yield port, theirs


def flood(theirs: socket.socket, data: bytes) -> None:
    try:
        while True:
            theirs.send(data)
    except BlockingIOError:
        pass


@pytest.mark.parametrize("data", [b"?", b"t", b".", os.urandom(4096)], ids=["credentials", "time", "taken", "noise"])
def test_a_flood_of_questions_is_answered_a_few_times(
    ends: tuple[CredentialPort, socket.socket], data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, theirs = ends
    served = received = 0
    clock = WaitingClock()
    monkeypatch.setattr(credential_port, "time", SimpleNamespace(monotonic=clock.monotonic, time_ns=time.time_ns))
    for _ in range(2000):
        clock.sleep(0.001)
        flood(theirs, data)
        readable, writable = port.waits_for()
        if readable or writable:
            served += 1
            port.serve()
        try:
            while got := theirs.recv(1 << 20):
                received += len(got)
        except BlockingIOError:
            pass
    # The first few at once, then two a second; a long answer is sent in several parts.
    assert served < credential_port.QUESTIONS * 20
    assert received < credential_port.MAXIMUM_BYTES * (credential_port.QUESTIONS + 2 * 3)


def test_a_machine_that_takes_no_answer_is_never_waited_for(ends: tuple[CredentialPort, socket.socket]) -> None:
    port, theirs = ends
    theirs.send(b"?")
    for _ in range(1000):
        port.serve()
    assert port.waits_for()[0] == []  # nor is it heard before it has taken the answer
    taken = b""
    while not taken.endswith(b"end 0\n"):
        port.serve()
        taken += theirs.recv(1 << 20)
    assert port.waits_for()[0] != []
