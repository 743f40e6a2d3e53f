"""Another user of the controller's host knocks on the canary while an environment's isolation is being proved.

Knocks without a word, with wrong words, by the hundred and without end must neither fail the environment nor keep the
canary from noticing the word that a machine repeats, nor cost the controller memory, descriptors or a processor.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import provisioner.isolation.canary as canary_module
from provisioner.base.models import Role
from provisioner.isolation.canary import VISITORS_AT_ONCE, Canary
from provisioner.isolation.questions import CanaryPorts
from tests.waiting import BOUND_SECONDS, until

WORDS: dict[Role, str] = {"primary": "0123456789abcdef" * 2, "vault": "fedcba9876543210" * 2}


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@contextlib.contextmanager
def knocking(ports: CanaryPorts, said: bytes) -> Iterator[None]:
    """Knocks as fast as it can, by TCP and UDP, and leaves its connections open as long as it may.

    The body begins after more knocks than the canary has room for.
    """
    over, many = threading.Event(), threading.Event()

    def knock() -> None:
        visits: list[socket.socket] = []
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
            while not over.is_set():
                if len(visits) > VISITORS_AT_ONCE:
                    many.set()
                if len(visits) > 200:
                    visits.pop(0).close()
                with contextlib.suppress(OSError):  # it is dismissed, or says too much for a datagram
                    visits.append(socket.create_connection(("127.0.0.1", ports.tcp), BOUND_SECONDS))
                    visits[-1].sendall(said)
                    datagrams.sendto(said, ("127.0.0.1", ports.udp))
        for visit in visits:
            visit.close()

    thread = threading.Thread(target=knock)
    thread.start()
    try:
        until(many.is_set, thread.is_alive)
        yield
    finally:
        over.set()
        thread.join()


def repeated(canary: Canary, machine: socket.socket) -> list[Role]:
    """Says a machine's word once more, as guest/sent/probe.py does for a second; a busy host may need longer."""
    machine.sendto(WORDS["primary"].encode(), ("127.0.0.1", canary.ports.udp))
    return canary.visitors()


@pytest.mark.parametrize(
    "said", [b"", b"GET / HTTP/1.0\r\n\r\n", b"f" * 32, b"x" * 100_000], ids=["silence", "http", "wrong", "long"]
)
def test_a_local_users_knock_changes_nothing(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile the machine's datagrams are heard, which it repeats, and afterwards its connection."""
    monkeypatch.setattr(canary_module, "VISIT_SECONDS", BOUND_SECONDS)  # so that no busy host delays the word too long
    before = descriptors()
    with Canary(WORDS) as canary:
        with knocking(canary.ports, said), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
            assert canary.visitors() == []
            # The knocking holds up to 201 descriptors of its own.
            assert descriptors() - before < 201 + VISITORS_AT_ONCE + 100
            assert until(lambda: repeated(canary, datagrams)) == ["primary"]
        with socket.create_connection(("127.0.0.1", canary.ports.tcp), BOUND_SECONDS) as machine:
            machine.sendall(WORDS["vault"].encode())
            assert until(lambda: canary.visitors()[1:]) == ["vault"]


def test_a_word_that_arrived_counts_though_others_need_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    looked, may_look = threading.Event(), threading.Event()

    class Clock:
        monotonic = staticmethod(lambda: 0.0)

        @staticmethod
        def sleep(_: float) -> None:
            looked.set()
            may_look.wait(BOUND_SECONDS)

    monkeypatch.setattr(canary_module, "time", Clock)
    with Canary(WORDS) as canary, contextlib.ExitStack() as visits:

        def visit() -> socket.socket:
            return visits.enter_context(socket.create_connection(("127.0.0.1", canary.ports.tcp), BOUND_SECONDS))

        machine = visit()
        assert looked.wait(BOUND_SECONDS)
        for _ in range(VISITORS_AT_ONCE):
            visit()
        machine.sendall(WORDS["primary"].encode())
        may_look.set()
        assert until(canary.visitors) == ["primary"]


@contextlib.contextmanager
def flooding(port: int) -> Iterator[None]:
    """Sends datagrams as fast as it can, from a process of its own."""
    program = (
        "import socket, sys\n"
        "flood = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "flood.connect(('127.0.0.1', int(sys.argv[1])))\n"
        "for _ in range(1000):\n    flood.send(b'f' * 32)\n"
        "print('floods', flush=True)\n"
        "while True:\n    flood.send(b'f' * 32)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(port)], stdout=subprocess.PIPE) as flooder:
        try:
            assert flooder.stdout
            assert flooder.stdout.readline() == b"floods\n"
            yield
        finally:
            flooder.kill()


def test_a_machines_datagram_is_heard_in_a_flood() -> None:
    with (
        Canary(WORDS) as canary,
        flooding(canary.ports.udp),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as machine,
    ):
        assert until(lambda: repeated(canary, machine)) == ["primary"]


def test_an_idle_canary_with_a_crowd_costs_no_cpu() -> None:
    with Canary(WORDS) as canary, contextlib.ExitStack() as crowd:
        for _ in range(VISITORS_AT_ONCE - 1):
            crowd.enter_context(socket.create_connection(("127.0.0.1", canary.ports.tcp), BOUND_SECONDS))
        # What waits for events that are not there yet does not work.
        until(lambda: not canary._selector.select(0))
        assert canary.visitors() == []
