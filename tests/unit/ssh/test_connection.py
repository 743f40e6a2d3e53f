"""Tests SSH connections against a real server in this process."""

from __future__ import annotations

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
from paramiko.pipe import PosixPipe

from provisioner.base.errors import CommandTimeoutError, MachineLostError, UsageError
from provisioner.base.models import Endpoint
from provisioner.copying.transfer import download, upload
from provisioner.ssh.connection import Connection
from provisioner.ssh.exchange import BoundedBuffer
from provisioner.ssh.keys import Login, ed25519_key_pair
from tests.ports import reserved_port
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
    received: dict[str, bytes] = {"out": b"", "err": b""}

    def listen(name: str) -> Callable[[bytes], None]:
        def take(data: bytes) -> None:
            received[name] += data

        return take

    script = "head -c 100000 /dev/zero | tr '\\0' a; echo end; head -c 50000 /dev/zero | tr '\\0' b >&2"
    done = connection.run(sh(script), on_stdout=listen("out"), on_stderr=listen("err"), limit_bytes=1000)
    assert (len(received["out"]), len(received["err"])) == (100_004, 50_000)
    assert done.stdout.startswith(b"a" * 500 + b"\n[... 99004 bytes cut out ...]\n")
    assert done.stdout.endswith(b"aend\n"[1:])
    assert len(done.stderr) < 1100


def test_an_exception_from_a_listener_ends_the_command(connection: Connection) -> None:
    def refuse(_: bytes) -> None:
        raise Stop

    with pytest.raises(Stop):
        connection.run(sh("echo one; exec sleep 1000"), on_stdout=refuse)
    assert connection.run(["true"]).exit_code == 0


@pytest.mark.parametrize(
    "error", [BrokenPipeError("stdout"), EOFError("stdin"), ConnectionResetError("peer")], ids=["pipe", "end", "reset"]
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


def test_the_checks_exception_is_no_lost_connection(login: Login) -> None:
    has_output = threading.Event()

    def check() -> None:
        if has_output.is_set():
            raise BrokenPipeError

    with Connection(login, check=check) as connection, pytest.raises(BrokenPipeError):
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


def test_an_exception_from_the_check_ends_the_wait(login: Login) -> None:
    has_output = threading.Event()

    def check() -> None:
        if has_output.is_set():
            raise Stop

    with Connection(login, check=check) as connection, pytest.raises(Stop):
        connection.run(sh("echo one; exec sleep 1000"), on_stdout=lambda _: has_output.set())


def test_another_host_key_is_refused_before_our_key_is_offered(server: Sshd, login: Login) -> None:
    offered: list[str] = []

    def note(_: str, key: str) -> bool:
        offered.append(key)
        return True

    server.authorize = note
    wrong = Login(login.endpoint, login.user, login.private_key, ed25519_key_pair().public)
    with pytest.raises(MachineLostError, match="shows a host key that is not the machine's"):
        Connection(wrong)
    assert offered == []


def test_a_host_key_of_another_type_is_refused(login: Login) -> None:
    wrong = Login(login.endpoint, login.user, login.private_key, "ecdsa-sha2-nistp256 AAAA")
    with pytest.raises(MachineLostError, match="answers, but SSH fails"):
        Connection(wrong)


def test_an_unsupported_host_key_closes_the_connection(server: Sshd, login: Login) -> None:
    wrong = Login(login.endpoint, login.user, login.private_key, "ssh-rsa AAAA")
    with pytest.raises(MachineLostError, match="answers, but SSH fails: host keys of type ssh-rsa are not supported"):
        Connection(wrong)
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
        endpoint = Endpoint(host="127.0.0.1", port=listener.getsockname()[1])
        with pytest.raises(MachineLostError, match="answers, but SSH fails"):
            Connection(Login(endpoint, "root", login.private_key, login.host_key))
        thread.join()


def test_a_machine_that_does_not_answer_raises_machine_lost(login: Login) -> None:
    with reserved_port() as port, pytest.raises(MachineLostError, match="it did not answer in time"):
        Connection(replace(login, endpoint=Endpoint(host="127.0.0.1", port=port)), 0.01)


def test_a_machine_that_has_ended_is_not_waited_for(login: Login) -> None:
    with reserved_port() as port, pytest.raises(MachineLostError, match="it ended by itself"):
        Connection(replace(login, endpoint=Endpoint(host="127.0.0.1", port=port)), 1000, alive=lambda: False)


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


@pytest.mark.parametrize("piece", [1, 3, 7, 100], ids=str)
@pytest.mark.parametrize(
    ("size", "kept"),
    [(0, b""), (10, b"0123456789"), (11, b"01234\n[... 1 bytes cut out ...]\n67890"), (25, None)],
    ids=["empty", "full", "over", "double"],
)
def test_a_bounded_buffer_keeps_both_ends_of_split_data(size: int, kept: bytes | None, piece: int) -> None:
    data = (b"0123456789" * 3)[:size]
    buffer = BoundedBuffer(10)
    for at in range(0, size, piece):
        buffer.write(data[at : at + piece])
    assert buffer.value() == (b"01234\n[... 15 bytes cut out ...]\n01234" if kept is None else kept)


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
