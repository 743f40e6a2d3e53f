"""Tests connections from within another process's network namespace, in real namespaces."""

from __future__ import annotations

import fcntl
import os
import resource
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from provisioner.base.errors import MachineLostError
from provisioner.base.models import Endpoint
from provisioner.ssh import connection, namespaces
from provisioner.ssh.connection import Connection
from provisioner.ssh.keys import Login, ed25519_key_pair
from provisioner.ssh.namespaces import SOCKETS_AT_ONCE, Sockets, proxy_command
from tests.unit.fakes.clock import WaitingClock
from tests.unit.fakes.enclosed import listening


@pytest.fixture
def enclosed(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    with listening(tmp_path) as pidfile_and_port:
        yield pidfile_and_port


def test_many_connections_reach_the_namespaces_listener(enclosed: tuple[Path, int]) -> None:
    pidfile, port = enclosed
    sockets = Sockets(pidfile)
    for _ in range(SOCKETS_AT_ONCE + 2):
        with sockets.connect("127.0.0.1", port, 5) as connection:
            connection.settimeout(5)
            assert connection.recv(10) == b"within"
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    sockets.close()


def test_a_direct_connection_delays_no_small_message() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        Sockets().connect("127.0.0.1", listener.getsockname()[1], 5) as connection,
    ):
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_nothing_listens_outside(enclosed: tuple[Path, int]) -> None:
    with pytest.raises(ConnectionRefusedError):
        Sockets().connect("127.0.0.1", enclosed[1], 5)


def test_an_unlocked_pidfile_names_no_process(tmp_path: Path) -> None:
    (tmp_path / "pid").write_text(f"{os.getpid()}\n")
    with pytest.raises(ConnectionError, match="network cannot be entered: its process has ended"):
        Sockets(tmp_path / "pid").connect("127.0.0.1", 22, 5)


def test_the_hosts_own_network_is_never_taken_for_a_machines(tmp_path: Path) -> None:
    with (tmp_path / "pid").open("w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        with pytest.raises(ConnectionError, match="in the network of the host"):
            Sockets(tmp_path / "pid").connect("127.0.0.1", 22, 5)


def test_a_network_that_cannot_be_entered_is_tried_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, tries = ed25519_key_pair(), []
    (tmp_path / "key").write_text(pair.private)
    login = Login(Endpoint(host="127.0.0.1", port=22), "root", tmp_path / "key", pair.public, pidfile=tmp_path / "pid")

    def refuse(pidfile: Path) -> NoReturn:
        tries.append(pidfile)
        raise ConnectionError

    monkeypatch.setattr(namespaces, "_open_sockets", refuse)
    monkeypatch.setattr(connection, "time", WaitingClock())
    with pytest.raises(MachineLostError, match="did not answer in time"):
        Connection(login, 5)
    assert len(tries) == 7  # one in 0.7 s


def test_a_process_lives_that_cannot_be_asked_about_now(enclosed: tuple[Path, int]) -> None:
    free = os.dup(0)
    os.close(free)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            os.dup(0)
        assert namespaces.is_held(enclosed[0])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert namespaces.is_held(enclosed[0])
    assert not namespaces.is_held(enclosed[0].with_name("absent"))


@pytest.mark.parametrize("planted", ["link", "circle", "pipe", "socket", "directory"])
def test_what_a_machine_puts_in_its_pidfiles_place_holds_nothing(planted: str, enclosed: tuple[Path, int]) -> None:
    place = enclosed[0].with_name(planted)
    if planted == "link":
        place.symlink_to(enclosed[0])
    elif planted == "circle":
        place.symlink_to(place)
    elif planted == "pipe":
        os.mkfifo(place)
    elif planted == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(place))
    else:
        place.mkdir()
    assert not namespaces.is_held(place)


def test_openssh_is_handed_a_connected_socket(enclosed: tuple[Path, int]) -> None:
    ours, theirs = socket.socketpair()
    pidfile, port = enclosed
    with ours, theirs:
        subprocess.run(proxy_command(pidfile, "127.0.0.1", port), stdout=theirs.fileno(), check=True)
        message, [descriptor], _, _ = socket.recv_fds(ours, 10, 2)
    with socket.socket(fileno=descriptor) as connection:
        assert (message, connection.recv(10)) == (b"\0", b"within")
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
