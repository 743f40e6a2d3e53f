"""Commands over SSH, against a server in this process that runs them here."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import paramiko
import pytest

from provisioner.errors import MachineLostError
from provisioner.models import Endpoint
from provisioner.remote.exchange import Completed
from provisioner.remote.keys import ed25519_key_pair
from provisioner.remote.login import Login
from provisioner.remote.ssh import Connection


class Server(paramiko.ServerInterface):
    """Lets everybody in, and runs what it is told as this process's child."""

    def __init__(self, key: paramiko.PKey) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._key = key
        self._transports: list[paramiko.Transport] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        for transport in self._transports:
            transport.close()

    def close(self) -> None:
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                transport = paramiko.Transport(self._listener.accept()[0])
                transport.add_server_key(self._key)
                transport.start_server(event=threading.Event(), server=self)
                self._transports.append(transport)

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        return paramiko.common.AUTH_SUCCESSFUL

    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return paramiko.common.OPEN_SUCCEEDED

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        threading.Thread(target=self._run, args=(channel, shlex.split(command.decode())), daemon=True).start()
        return True

    def _run(self, channel: paramiko.Channel, argv: list[str]) -> None:
        """As sshd does: the exit status once the command has ended, the end of output once nobody holds it."""
        with contextlib.suppress(OSError, EOFError):
            child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            assert child.stdin and child.stdout and child.stderr  # noqa: PT018
            out = _pump(child.stdout.fileno(), channel.sendall)
            err = _pump(child.stderr.fileno(), channel.sendall_stderr)
            threading.Thread(target=_feed, args=(channel, child.stdin), daemon=True).start()
            code = child.wait()
            if code >= 0:
                channel.send_exit_status(code)
            out.join()
            err.join()
            child.stdout.close()
            child.stderr.close()
            channel.close()


def _pump(descriptor: int, send: Callable[[bytes], object]) -> threading.Thread:
    def copy() -> None:
        with contextlib.suppress(OSError):
            while data := os.read(descriptor, 1 << 16):
                send(data)

    thread = threading.Thread(target=copy, daemon=True)
    thread.start()
    return thread


def _feed(channel: paramiko.Channel, stdin: io.BufferedWriter) -> None:
    with contextlib.suppress(OSError), stdin:
        while data := channel.recv(1 << 16):
            stdin.write(data)
            stdin.flush()


@dataclass
class Machine:
    server: Server
    login: Login


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    pair = ed25519_key_pair()
    key = tmp_path / "key"
    key.write_text(pair.private)
    server = Server(paramiko.Ed25519Key.from_private_key_file(str(key)))
    yield Machine(server, Login(Endpoint(host="127.0.0.1", port=server.port), "root", key, pair.public))
    server.close()


@pytest.fixture
def connection(machine: Machine) -> Iterator[Connection]:
    with Connection(machine.login, wait_seconds=30) as opened:
        yield opened


def test_a_commands_output_and_exit_code_come_back(connection: Connection) -> None:
    done = connection.run(["sh", "-c", "echo out; echo err >&2; exit 3"])
    assert done == Completed(3, b"out\n", b"err\n")


def test_arguments_arrive_as_they_are(connection: Connection) -> None:
    awkward = "a b'c\"d$HOME\n*"
    assert connection.run(["printf", "%s", awkward]).stdout == awkward.encode()


@pytest.mark.parametrize("streamed", [False, True], ids=["bytes", "file"])
def test_input_goes_there_and_back(connection: Connection, streamed: bool) -> None:
    data = os.urandom(3 << 20)
    pieces: list[bytes] = []
    done = connection.run(["cat"], stdin=io.BytesIO(data) if streamed else data, on_stdout=pieces.append)
    assert (done.exit_code, done.stdout, b"".join(pieces)) == (0, data, data)


def test_output_is_bounded(connection: Connection) -> None:
    done = connection.run(["head", "-c", "100000", "/dev/zero"], limit_bytes=1000)
    assert done.stdout == bytes(500) + b"\n[... 99000 bytes cut out ...]\n" + bytes(500)


def test_what_runs_on_in_the_background_is_not_awaited(connection: Connection) -> None:
    done = connection.run(["sh", "-c", "sleep 20 & echo started"], timeout_seconds=10)
    assert done == Completed(0, b"started\n", b"")


def test_a_signal_that_ends_the_command_shows_as_no_exit_code(connection: Connection) -> None:
    assert connection.run(["sh", "-c", "kill -KILL $$"]).exit_code == -1


def test_a_command_that_does_not_end_in_time_is_given_up(connection: Connection) -> None:
    with pytest.raises(TimeoutError, match=r"^sleep did not end within 0\.2 s$"):
        connection.run(["sleep", "20"], timeout_seconds=0.2)


def test_a_connection_that_breaks_loses_the_machine(machine: Machine, connection: Connection) -> None:
    threading.Timer(0.2, machine.server.cut).start()
    with pytest.raises(MachineLostError, match=f"^The connection to the machine at 127.0.0.1:{machine.server.port} br"):
        connection.run(["sleep", "20"])


def test_a_tree_is_streamed_as_an_archive(connection: Connection, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("content")
    target = tmp_path / "target"
    target.mkdir()
    sent = connection.send_tree(["tar", "-x", "-C", str(target)], lambda tar: tar.add(tmp_path / "file", "file"))
    assert sent == Completed(0, b"", b"")
    assert (target / "file").read_text() == "content"


def test_another_host_key_than_the_pinned_one_is_refused(machine: Machine) -> None:
    login = Login(machine.login.endpoint, "root", machine.login.private_key, ed25519_key_pair().public)
    with pytest.raises(MachineLostError, match="host key that is not the machine's"):
        Connection(login, wait_seconds=30)
