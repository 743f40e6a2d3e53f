"""Tests connections from within another process's network namespace, in real namespaces."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from provisioner.remote.namespaces import SOCKETS_AT_ONCE, Sockets, proxy_command
from tests.unit.fakes.enclosed import listening


@pytest.fixture
def enclosed(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    with listening(tmp_path) as pidfile_and_port:
        yield pidfile_and_port


def test_any_number_of_connections_reach_what_listens_in_the_namespace(enclosed: tuple[Path, int]) -> None:
    pidfile, port = enclosed
    sockets = Sockets(pidfile)
    for _ in range(SOCKETS_AT_ONCE + 2):
        with sockets.connect("127.0.0.1", port, 5) as connection:
            assert connection.recv(10) == b"within"
    sockets.close()


def test_nothing_listens_outside(enclosed: tuple[Path, int]) -> None:
    with pytest.raises(ConnectionRefusedError):
        Sockets().connect("127.0.0.1", enclosed[1], 5)


def test_a_process_that_has_ended_is_a_broken_connection(tmp_path: Path) -> None:
    (tmp_path / "pid").write_text("4194305\n")  # above the kernel's highest pid
    with pytest.raises(ConnectionError, match="network cannot be entered"):
        Sockets(tmp_path / "pid").connect("127.0.0.1", 22, 5)


def test_openssh_is_handed_a_connected_socket(enclosed: tuple[Path, int]) -> None:
    ours, theirs = socket.socketpair()
    pidfile, port = enclosed
    with ours, theirs:
        subprocess.run(proxy_command(pidfile, "127.0.0.1", port), stdout=theirs.fileno(), check=True)
        message, [descriptor], _, _ = socket.recv_fds(ours, 10, 2)
    with socket.socket(fileno=descriptor) as connection:
        assert (message, connection.recv(10)) == (b"\0", b"within")
