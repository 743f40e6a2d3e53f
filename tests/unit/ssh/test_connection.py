"""Tests SSH connections against a real server in this process."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, cast

import pytest
from paramiko import pipe as pipes
from paramiko.common import OPEN_FAILED_CONNECT_FAILED
from paramiko.pipe import PosixPipe

from provisioner.base.errors import CommandTimeoutError, MachineLostError, NotStartedError, UsageError
from provisioner.base.models import Endpoint
from provisioner.copying.transfer import download, upload
from provisioner.ssh import connection as ssh
from provisioner.ssh.connection import Connection, answering_socket
from provisioner.ssh.keys import Login, ed25519_key_pair
from tests.ports import reserved_port
from tests.unit.fakes.clock import WaitingClock
from tests.unit.fakes.exec_call import Call
from tests.unit.fakes.sshd import Sshd
from tests.waiting import BOUND_SECONDS, until

Stop = type("Stop", (Exception,), {})


@pytest.fixture
def server() -> Iterator[Sshd]:
    with Sshd() as server:
        yield server


@pytest.fixture
def login(server: Sshd, tmp_path: Path) -> Login:
    return login_to(server, tmp_path)


@pytest.fixture
def connection(login: Login) -> Iterator[Connection]:
    with Connection(login) as connection:
        yield connection


def login_to(server: Sshd, directory: Path, via: Login | None = None) -> Login:
    pair = ed25519_key_pair()
    server.authorize = lambda user, key: (user, key) == ("root", pair.public)
    path = directory / f"key-{server.port}"
    path.write_text(pair.private)
    return Login(Endpoint(host="127.0.0.1", port=server.port), "root", path, server.host_key, via)


def sh(script: str) -> list[str]:
    return ["sh", "-c", script]


def test_a_command_returns_its_exit_code_and_both_streams(connection: Connection) -> None:
    done = connection.run(sh("echo out; echo err >&2; exit 3"))
    assert (done.exit_code, done.stdout, done.stderr) == (3, b"out\n", b"err\n")


def test_arguments_arrive_unchanged(connection: Connection) -> None:
    arguments = ["a b", "", "'", '"', "$HOME", "`id`", "*", "\\", "ä", "-n"]
    done = connection.run(["sh", "-c", r'for a in "$@"; do printf "%s\0" "$a"; done', "sh", *arguments])
    assert done.stdout.decode().split("\0")[:-1] == arguments


def test_the_cipher_is_one_that_needs_no_mac_besides(connection: Connection) -> None:
    assert connection._transport.local_cipher == "aes128-gcm@openssh.com"


@pytest.mark.parametrize("size", [0, 1, 3 << 20], ids=["empty", "byte", "megabytes"])
@pytest.mark.parametrize("kind", [bytes, io.BytesIO], ids=["bytes", "file"])
def test_the_command_reads_all_of_stdin_and_its_end(
    connection: Connection, kind: Callable[[bytes], bytes], size: int
) -> None:
    data = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    assert connection.run(["cat"], stdin=kind(data)).stdout == data


def test_a_command_that_does_not_read_its_input_has_its_code(connection: Connection) -> None:
    done = connection.run(sh("exec <&-; exit 4"), stdin=b"x" * (4 << 20), timeout_seconds=BOUND_SECONDS)
    assert done.exit_code == 4


def test_a_connection_lost_during_input_raises_machine_lost(server: Sshd, connection: Connection) -> None:
    class Endless(io.RawIOBase):
        sent = 0

        def read(self, size: int = -1, /) -> bytes:
            self.sent += size
            if self.sent > 1 << 20:
                server.cut()
            return b"x" * size

    with pytest.raises(MachineLostError):
        connection.run(["cat"], stdin=cast("IO[bytes]", Endless()), timeout_seconds=BOUND_SECONDS)


def test_output_arrives_at_once_and_within_bounds(connection: Connection) -> None:
    out, err = bytearray(), bytearray()
    script = "head -c 100000 /dev/zero | tr '\\0' a; echo end; head -c 50000 /dev/zero | tr '\\0' b >&2"
    done = connection.run(sh(script), on_stdout=out.extend, on_stderr=err.extend, limit_bytes=1000)
    assert (len(out), len(err)) == (100_004, 50_000)
    assert done.stdout.startswith(b"a" * 500 + b"\n[... 99004 bytes cut out ...]\n")
    assert done.stdout.endswith(b"aend\n"[1:])
    assert len(done.stderr) < 1100


@pytest.mark.parametrize(
    "error", [Stop(), BrokenPipeError("stdout"), EOFError("stdin"), ConnectionResetError("peer")], ids=repr
)
@pytest.mark.parametrize("stream", ["on_stdout", "on_stderr"])
def test_a_listeners_exception_is_no_lost_connection(connection: Connection, error: Exception, stream: str) -> None:
    def refuse(_: bytes) -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        connection.run(sh("echo one; echo two >&2; exec sleep 1000"), **{stream: refuse})  # type: ignore[arg-type]
    assert caught.value is error
    assert connection.run(["true"]).exit_code == 0


def test_output_during_a_close_breaks_no_connection(
    server: Sshd, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_pipe, is_closing, has_arrived = threading.Event(), threading.Event(), threading.Event()

    def make_pipe() -> Any:
        has_pipe.set()
        return real_pipe()

    real_pipe = pipes.make_pipe

    def close_slowly(pipe: PosixPipe) -> None:
        os.close(pipe.fileno())
        os.close(pipe._wfd)  # type: ignore[attr-defined]
        is_closing.set()
        has_arrived.wait(BOUND_SECONDS)
        pipe._closed = True  # type: ignore[attr-defined]

    def program(call: Call) -> None:
        has_pipe.wait(BOUND_SECONDS)  # what arrives before the client waits for output needs none
        call.say(b"one")
        is_closing.wait(BOUND_SECONDS)
        call.say(b"two")
        call.channel.get_transport().global_request("answered after all that came before")
        has_arrived.set()

    monkeypatch.setattr(pipes, "make_pipe", make_pipe)
    monkeypatch.setattr(PosixPipe, "close", close_slowly)
    server.program = program

    def refuse(_: bytes) -> None:
        raise Stop

    with pytest.raises(Stop):
        connection.run(["true"], on_stdout=refuse)
    assert has_arrived.is_set()
    assert connection.active


@pytest.mark.parametrize("error", [Stop, BrokenPipeError])
def test_the_checks_exception_ends_the_wait_and_is_no_lost_connection(login: Login, error: type[Exception]) -> None:
    has_output = threading.Event()

    def check() -> None:
        if has_output.is_set():
            raise error

    with Connection(login, check=check) as connection, pytest.raises(error):
        connection.run(sh("echo one; exec sleep 1000"), on_stdout=lambda _: has_output.set())


def test_a_command_killed_by_signal_n_exits_with_128_plus_n(connection: Connection) -> None:
    assert connection.run(sh("kill -KILL $$")).exit_code == 137
    assert connection.run(["true"]).exit_code == 0


def test_a_background_process_is_not_waited_for(connection: Connection) -> None:
    done = connection.run(sh("sleep 1000 & echo $!"), timeout_seconds=BOUND_SECONDS)
    os.kill(int(done.stdout), signal.SIGKILL)
    assert done.exit_code == 0


class MovedClock:
    """The time module as the exchange sees it, with a clock that a test moves ahead."""

    ahead_seconds = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_seconds


def test_a_timeout_leaves_the_connection_usable(connection: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = MovedClock()
    monkeypatch.setattr("provisioner.ssh.exchange.time", clock)

    def pass_the_time(_: bytes) -> None:
        clock.ahead_seconds = BOUND_SECONDS

    with pytest.raises(TimeoutError, match=rf"sh did not end within {BOUND_SECONDS:g} s"):
        connection.run(sh("echo begun; exec sleep 600"), on_stdout=pass_the_time, timeout_seconds=BOUND_SECONDS)
    assert connection.run(["true"]).exit_code == 0


def test_a_connection_lost_during_a_command_raises_machine_lost(server: Sshd, connection: Connection) -> None:
    with pytest.raises(MachineLostError, match=f"127.0.0.1:{server.port}"):
        connection.run(sh("echo one; exec sleep 1000"), on_stdout=lambda _: server.cut())
    with pytest.raises(MachineLostError):
        connection.run(["true"])


def test_another_host_key_is_refused_before_our_key_is_offered(server: Sshd, login: Login) -> None:
    offered: list[str] = []

    def note(_: str, key: str) -> bool:
        offered.append(key)
        return True

    server.authorize = note
    wrong = replace(login, host_key=ed25519_key_pair().public)
    with pytest.raises(MachineLostError, match="shows a host key that is not the machine's"):
        Connection(wrong)
    assert offered == []


@pytest.mark.parametrize(
    ("host_key", "says"),
    [
        ("ecdsa-sha2-nistp256 AAAA", "answers, but SSH fails"),
        ("ssh-rsa AAAA", "keys of type ssh-rsa are not supported"),
    ],
    ids=["another", "unsupported"],
)
def test_a_host_key_of_another_type_closes_the_connection(server: Sshd, login: Login, host_key: str, says: str) -> None:
    with pytest.raises(MachineLostError, match=says):
        Connection(replace(login, host_key=host_key))
    until(lambda: server.connections() == 0)


@pytest.mark.parametrize("change", ["user", "key"])
def test_a_refused_login_raises_machine_lost(login: Login, tmp_path: Path, change: str) -> None:
    other = tmp_path / "other"
    other.write_text(ed25519_key_pair().private)
    user, key = ("agent", login.private_key) if change == "user" else ("root", other)
    with pytest.raises(MachineLostError, match=f"{user}@127.0.0.1:.* answers, but SSH fails"):
        Connection(Login(login.endpoint, user, key, login.host_key))


def test_a_server_that_does_not_speak_ssh_raises_machine_lost(login: Login) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            stream, _ = listener.accept()
            with stream:
                stream.sendall(b"HTTP/1.1 400 Bad Request\r\n" * 200)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with pytest.raises(MachineLostError, match="answers, but SSH fails"):
            Connection(replace(login, endpoint=login_at(listener).endpoint))
        thread.join()


@pytest.mark.parametrize(
    ("seconds", "alive", "says"), [(0.01, True, "did not answer in time"), (1000, False, "ended by itself")], ids=str
)
def test_a_machine_is_waited_for_until_it_has_ended(login: Login, seconds: float, alive: bool, says: str) -> None:
    with reserved_port() as port, pytest.raises(MachineLostError, match=says):
        Connection(replace(login, endpoint=Endpoint(host="127.0.0.1", port=port)), seconds, alive=lambda: alive)


def test_a_machine_that_is_still_booting_is_waited_for(tmp_path: Path) -> None:
    calls: list[int] = []

    def is_up() -> bool:
        calls.append(1)
        return len(calls) > 2

    with Sshd(is_up=is_up) as server, Connection(login_to(server, tmp_path)) as connection:
        assert connection.run(["true"]).exit_code == 0


def test_a_machine_behind_another_one_is_reached_through_it(server: Sshd, tmp_path: Path) -> None:
    with Sshd() as behind:
        login = login_to(behind, tmp_path, login_to(server, tmp_path))
        with Connection(login) as connection:
            assert connection.run(["cat"], stdin=b"there").stdout == b"there"
            with pytest.raises(MachineLostError):
                connection.run(sh("echo one; exec sleep 1000"), on_stdout=lambda _: server.cut())


def test_closing_twice_is_not_an_error(login: Login) -> None:
    connection = Connection(login)
    connection.close()
    connection.close()
    with pytest.raises(MachineLostError):
        connection.run(["true"])


def test_a_failed_copy_is_explained_in_the_machines_words(connection: Connection, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="could not be read") as caught:
        download(connection, str(tmp_path / "nothing"), tmp_path / "copy")
    assert "No such file or directory" in str(caught.value.details)
    with pytest.raises(UsageError, match="could not be written") as caught:
        upload(connection, Path(__file__), "/nonexistent/directory/file")
    assert "No such file or directory" in str(caught.value.details)


def test_the_time_for_a_file_grows_with_its_size(
    connection: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("provisioner.ssh.calls.SMALL_CALL_SECONDS", 1e-9)
    monkeypatch.setattr("provisioner.ssh.exchange.TRANSFER_BYTES_PER_SECOND", 1)
    path, data = str(tmp_path / "file"), b"x" * 60
    connection.write_file(path, data)
    connection.write_file(path, io.BytesIO(data))
    assert connection.read_file(path, len(data)) == data
    monkeypatch.setattr("provisioner.ssh.exchange.TRANSFER_BYTES_PER_SECOND", 1 << 30)
    with pytest.raises(CommandTimeoutError):
        connection.read_file(path, len(data))
    with pytest.raises(CommandTimeoutError):
        connection.write_file(path, io.BytesIO(data))


@pytest.fixture
def silent_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sshd]:
    """A machine whose server does not answer; `service` in the directory says that it has one."""
    monkeypatch.setattr(ssh, "SERVICE", str(tmp_path / "service"))
    monkeypatch.setattr(ssh, "PAUSE_SECONDS", 0.1)
    with Sshd() as server:
        server.has_server = False
        yield server


def test_a_machine_that_has_no_server_yet_gets_one_for_each_call(silent_server: Sshd, tmp_path: Path) -> None:
    with Connection(login_to(silent_server, tmp_path)) as connection:
        script = "cat; echo err >&2; kill -TERM $$"
        done = connection.run(["sh", "-c", script], stdin=b"in" * 100_000)
        assert (done.exit_code, done.stdout, done.stderr) == (143, b"in" * 100_000, b"err\n")
        connection.write_file(str(tmp_path / "new" / "file"), b"data")
        assert connection.read_file(str(tmp_path / "new" / "file"), 4) == b"data"
    assert sum("python3" in command for command in silent_server.commands) == 3


def test_a_machine_whose_server_has_ended_is_lost(
    silent_server: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh, "START_SECONDS", 0.5)
    (tmp_path / "service").touch()
    with (
        Connection(login_to(silent_server, tmp_path)) as connection,
        pytest.raises(MachineLostError, match="exec server has ended"),
    ):
        connection.run(["true"])
    assert not any("python3" in command for command in silent_server.commands)


def test_a_server_that_starts_again_is_waited_for(silent_server: Sshd, tmp_path: Path) -> None:
    (tmp_path / "service").touch()

    class Commands(list[str]):
        """Has the server start once a caller has asked whether the machine has one."""

        def append(self, command: str) -> None:
            super().append(command)
            silent_server.has_server = True

    silent_server.commands = Commands()
    with Connection(login_to(silent_server, tmp_path)) as connection:
        assert connection.run(["true"]).exit_code == 0
    assert silent_server.commands == [f"test -e {tmp_path}/service"]


def test_a_wait_for_the_server_can_be_stopped(silent_server: Sshd, tmp_path: Path) -> None:
    (tmp_path / "service").touch()
    asked: list[int] = []
    is_connected = False

    def check() -> None:
        if is_connected:
            asked.append(1)
        if len(asked) == 3:
            raise InterruptedError("the worker has lost its database")

    with Connection(login_to(silent_server, tmp_path), check=check) as connection:
        is_connected = True
        with pytest.raises(InterruptedError):
            connection.run(["true"])


def test_a_call_that_times_out_keeps_the_connection(silent_server: Sshd, tmp_path: Path) -> None:
    (tmp_path / "service").touch()
    with Connection(login_to(silent_server, tmp_path)) as connection:
        with pytest.raises(NotStartedError, match="did not start true"):
            connection.run(["true"], timeout_seconds=1)
        silent_server.has_server = True
        assert connection.run(["true"]).exit_code == 0


@pytest.mark.parametrize("timeout_seconds", [180, None])
def test_a_machine_that_is_frozen_has_not_started_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timeout_seconds: float | None
) -> None:
    thaw = threading.Event()

    def freeze(*_: object) -> int:
        thaw.wait(BOUND_SECONDS)
        return OPEN_FAILED_CONNECT_FAILED

    monkeypatch.setattr("tests.unit.fakes.sshd._Server.check_channel_request", freeze)
    with Sshd() as server, Connection(login_to(server, tmp_path)) as connection:
        monkeypatch.setattr("provisioner.ssh.connection.HANDSHAKE_SECONDS", 0.5)
        with pytest.raises(NotStartedError, match="does not answer"):
            connection.run(["true"], timeout_seconds=timeout_seconds)
        thaw.set()


BANNER = b"SSH-2.0-x\r\n"


def login_at(listener: socket.socket) -> Login:
    endpoint = Endpoint(host="127.0.0.1", port=listener.getsockname()[1])
    return Login(endpoint, "root", Path("/nonexistent"), "ssh-ed25519 key")


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
        deadline = time.monotonic() + seconds
        with answering_socket(login_at(listener), deadline, lambda: True, "machine", boots) as chosen:
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
    monkeypatch.setattr(ssh, "LONGEST_PAUSE_SECONDS", 2 * BOUND_SECONDS)
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
    monkeypatch.setattr(ssh, "time", clock)
    tried: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with pytest.raises(MachineLostError):
            answering_socket(login_at(listener), 12, lambda: True, "machine", boots)
        listener.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                tried.append(listener.accept()[0])
    for stream in tried:
        stream.close()
    assert len(tried) == attempts
