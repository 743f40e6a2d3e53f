"""Tests forwarded ports, through a real SSH server in this process."""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import paramiko
import pytest
from paramiko.common import MSG_CHANNEL_DATA

from provisioner.errors import MachineLostError, TaskError
from provisioner.signals import no_check
from provisioner.ssh import bounded_transport, forwarding
from provisioner.ssh.bounded_transport import PORT_WINDOW_BYTES
from provisioner.ssh.connection import Connection
from provisioner.ssh.forwarding import Forwarder, listen
from tests.attacks.hostile_sshd import message
from tests.ports import reserved_port
from tests.unit.fakes.sshd import Sshd, _Server
from tests.unit.ssh.test_connection import login_to
from tests.waiting import BOUND_SECONDS, until

Service = Callable[[socket.socket], None]


class Forwarded:
    """A machine whose port is forwarded.

    Attributes:
        port: this host's.
        notes: what was said of connections.
    """

    def __init__(self, server: Sshd, connection: Connection, forwarder: Forwarder, port: int, notes: list[str]) -> None:
        self.server, self.connection, self.forwarder = server, connection, forwarder
        self.port, self.notes = port, notes

    def client(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=BOUND_SECONDS)


@contextmanager
def service(serve: Service, host: str = "127.0.0.1") -> Iterator[int]:
    """Listens on a port of the machine, and serves each connection."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    serving: list[threading.Thread] = []
    with socket.create_server((host, 0), family=family) as listener:

        def accept() -> None:
            while True:
                try:
                    stream, _ = listener.accept()
                except OSError:
                    return
                serving.append(threading.Thread(target=_serve, args=(serve, stream), daemon=True))
                serving[-1].start()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        for each in (thread, *serving):
            each.join(BOUND_SECONDS)


def _serve(serve: Service, stream: socket.socket) -> None:
    with stream, contextlib.suppress(OSError):
        serve(stream)


@contextmanager
def forwarded(port: int, directory: Path) -> Iterator[Forwarded]:
    notes: list[str] = []
    with Sshd() as server, Connection(login_to(server, directory)) as connection:
        listener = listen(None)
        here = listener.getsockname()[1]
        with Forwarder(listener, lambda: connection.open_tcp(port), notes.append) as forwarder:
            yield Forwarded(server, connection, forwarder, here, notes)


def read_all(stream: socket.socket) -> bytes:
    data = b""
    while piece := stream.recv(1 << 16):
        data += piece
    return data


def digest_of_all(stream: socket.socket) -> None:
    """Answers once the client has said that this was all."""
    stream.sendall(hashlib.sha256(read_all(stream)).hexdigest().encode())


def echo(stream: socket.socket) -> None:
    while piece := stream.recv(1 << 16):
        stream.sendall(piece)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"], ids=["IPv4", "IPv6"])
def test_bytes_go_both_ways_and_each_direction_ends_for_itself(tmp_path: Path, host: str) -> None:
    data = os.urandom(5 << 20)
    with service(digest_of_all, host) as port, forwarded(port, tmp_path) as there, there.client() as client:
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)
        assert read_all(client).decode() == hashlib.sha256(data).hexdigest()


def test_a_long_answer_arrives_after_its_sender_has_gone(tmp_path: Path) -> None:
    data = os.urandom(3 << 20)
    begun = threading.Event()

    def send(stream: socket.socket) -> None:
        begun.set()
        stream.sendall(data)

    with service(send) as port, forwarded(port, tmp_path) as there, there.client() as client:
        assert begun.wait(BOUND_SECONDS)
        assert read_all(client) == data


def test_only_the_loopback_listens() -> None:
    with listen(None) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_the_preferred_port_is_taken_if_it_is_free() -> None:
    with reserved_port() as port, listen(None, preferred=port) as first, listen(None, preferred=port) as second:
        assert first.getsockname()[1] == port
        assert second.getsockname()[1] not in (0, port)
        with pytest.raises(OSError, match="in use"):
            listen(port)


def test_a_closed_port_is_reported_and_tried_again(tmp_path: Path) -> None:
    with reserved_port() as port, forwarded(port, tmp_path) as there:
        with there.client() as client:
            assert client.recv(1) == b""
        assert there.notes == [f"Port {port} of the machine is closed."]
        with (
            socket.create_server(("127.0.0.1", port)) as listener,
            there.client() as client,
            listener.accept()[0] as accepted,
        ):
            accepted.sendall(b"x")
            assert client.recv(1) == b"x"


def test_many_short_connections_are_no_flood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_transport, "MESSAGES_AT_ONCE", 50)
    monkeypatch.setattr(bounded_transport, "MESSAGES_PER_SECOND", 0)
    with service(echo) as port, forwarded(port, tmp_path) as there:
        for _ in range(100):
            with there.client() as client:
                client.sendall(b"x")
                client.shutdown(socket.SHUT_WR)
                assert read_all(client) == b"x"
        there.connection.require_active()


def test_no_more_connections_than_allowed_reach_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarding, "MOST_CONNECTIONS", 5)
    reached: list[int] = []

    def count_and_echo(stream: socket.socket) -> None:
        reached.append(1)
        echo(stream)

    with service(count_and_echo) as port, forwarded(port, tmp_path) as there, ExitStack() as clients:
        opened = [clients.enter_context(there.client()) for _ in range(8)]
        for client in opened:
            client.sendall(b"x")
        answered = until(lambda: answering(opened, 5))
        answered[0].close()
        waiting = [client for client in opened if client not in answered]
        assert len(until(lambda: answering(waiting, 1))) == 1
        assert len(reached) == 6


def answering(clients: list[socket.socket], count: int) -> list[socket.socket]:
    """Returns those that have an answer to read, if they are so many or more."""
    readable = select.select(clients, [], [], 0)[0]
    return readable if len(readable) >= count else []


def test_a_flood_for_a_client_that_does_not_read_is_held_back(tmp_path: Path) -> None:
    sent_bytes = 0

    def flood(stream: socket.socket) -> None:
        nonlocal sent_bytes
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        while True:
            sent_bytes += stream.send(bytes(1 << 16))

    with service(flood) as port, forwarded(port, tmp_path) as there, there.client():
        until(lambda: sent_bytes > PORT_WINDOW_BYTES)
        before = -1
        while sent_bytes != before:
            before = sent_bytes
            time.sleep(1)
        # What the kernel's buffers of three sockets hold, and one window.
        assert sent_bytes < 16 << 20


def test_a_client_that_breaks_off_frees_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarding, "MOST_CONNECTIONS", 1)

    def greet(stream: socket.socket) -> None:
        stream.sendall(b"x")
        stream.recv(1)  # until it is closed

    with service(greet) as port, forwarded(port, tmp_path) as there:
        for _ in range(3):
            with there.client() as client:
                assert client.recv(1) == b"x"
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # it resets


def test_a_client_that_closes_frees_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarding, "MOST_CONNECTIONS", 1)
    monkeypatch.setattr(forwarding, "KEEPALIVE_SECONDS", 1)
    released = threading.Event()

    def greet(stream: socket.socket) -> None:
        stream.sendall(b"x")
        released.wait()

    with service(greet) as port, forwarded(port, tmp_path) as there:
        for _ in range(2):
            with there.client() as client:
                assert client.recv(1) == b"x"
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_LINGER2, 1)  # its kernel soon forgets it
        released.set()


def test_a_client_that_has_said_all_waits_as_long_as_it_likes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarding, "KEEPALIVE_SECONDS", 1)
    released = threading.Event()

    def answer(stream: socket.socket) -> None:
        read_all(stream)
        released.wait()
        stream.sendall(b"late")

    with service(answer) as port, forwarded(port, tmp_path) as there, there.client() as client:
        client.shutdown(socket.SHUT_WR)
        time.sleep(3)
        released.set()
        assert read_all(client) == b"late"


def test_nothing_is_left_at_the_end(tmp_path: Path) -> None:
    before = threading.active_count()
    with service(echo) as port:
        with forwarded(port, tmp_path) as there:
            clients = [there.client() for _ in range(3)]
            for client in clients:
                client.sendall(b"x")
                assert client.recv(1) == b"x"
            here = there.port
        for client in clients:
            assert client.recv(1) == b""
            client.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", here))
    until(lambda: threading.active_count() <= before)


@pytest.mark.parametrize("when", ["idle", "asked"])
def test_a_lost_machine_ends_it(tmp_path: Path, when: str) -> None:
    with service(echo) as port, forwarded(port, tmp_path) as there:
        there.server.cut()
        if when == "asked":
            with there.client() as client:
                assert client.recv(1) == b""
        with pytest.raises(MachineLostError):
            there.forwarder.wait(there.connection.require_active if when == "idle" else no_check)


def test_an_sshd_that_sends_too_much_loses_the_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flood(onward: socket.socket, channel: paramiko.Channel) -> None:
        data = message(MSG_CHANNEL_DATA, channel.remote_chanid, bytes(32_000))
        with onward, contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            transport = channel.get_transport()
            while transport.is_active():
                transport._send_message(data)  # type: ignore[attr-defined]

    monkeypatch.setattr(_Server, "_forward", staticmethod(flood))
    violation = pytest.raises(TaskError, match="breaks the rules of SSH: it sent more output than it was allowed to")
    with service(echo) as port, forwarded(port, tmp_path) as there, there.client(), violation:
        there.forwarder.wait(there.connection.require_active)
