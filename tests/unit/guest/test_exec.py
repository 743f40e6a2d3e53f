"""Tests the exec server as a process on this host, without cgroups: over its Unix socket, as sshd reaches it."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import socket
import stat
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from provisioner.ssh.exec_frames import HEADER, REQUEST, STDIN, STDIN_END, STDOUT, Answers, CallEnd, frame
from tests.unit.fakes.exec_call import GUEST_PYTHON, SERVER, header
from tests.waiting import BOUND_SECONDS, until

ME = pwd.getpwuid(os.geteuid()).pw_name


# Root's commands may leave their cgroup, which then ends without them.
LEFT = "cgroup.Cgroup.end = lambda self: None\n"


@contextlib.contextmanager
def running(path: Path, before: str) -> Iterator[None]:
    """Runs a server on a socket, after some lines of Python."""
    program = SERVER.replace("exec_server.serve(0, 1)", f"{before}exec_server.listen({str(path)!r})")
    with subprocess.Popen([GUEST_PYTHON, "-I", "-S", "-B", "-c", program]) as process:
        try:
            until(path.exists, lambda: process.poll() is None)
            yield
        finally:
            process.kill()


@pytest.fixture(params=["", LEFT], ids=["whole", "left"])
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """Runs a server, and yields its socket."""
    with running(tmp_path / "socket", request.param):
        yield tmp_path / "socket"


WHOLE = pytest.mark.parametrize("server", [""], ids=["whole"], indirect=True)


def connected(server: Path) -> socket.socket:
    opened = socket.socket(socket.AF_UNIX)
    opened.settimeout(BOUND_SECONDS)

    def is_connected() -> bool:
        try:
            opened.connect(str(server))
        except ConnectionRefusedError:  # it is bound, and does not listen yet
            return False
        return True

    until(is_connected)
    return opened


def call(server: Path, stdin: bytes = b"", **request: Any) -> tuple[bytes, CallEnd | None]:
    """Makes a call, and returns its stdout and its end."""
    with connected(server) as channel:
        asked = frame(REQUEST, json.dumps({"operation": "execute", "user": ME, **request}).encode())
        # At once: a command that reads no input may have ended, and its call been closed, before a second message.
        channel.sendall(asked + (frame(STDIN, stdin) if stdin else b"") + frame(STDIN_END))
        return answers(channel)


def answers(channel: socket.socket) -> tuple[bytes, CallEnd | None]:
    heard, stdout = Answers(), b""
    while data := channel.recv(1 << 16):
        stdout += b"".join(piece for stream, piece in heard.feed(data, 0) if stream == "stdout")
    return stdout, heard.end


@WHOLE
def test_a_call_gets_a_login_and_no_descriptor_of_the_servers(server: Path) -> None:
    assert call(server, argv=["ls", "/proc/self/fd"])[0] == b"0\n1\n2\n3\n"  # the last is its own, of the directory
    script = 'umask; echo "$0 $GIVEN $USER"; cat; exit 3'
    stdout, end = call(server, b"in", argv=["bash", "-c", script, "a b"], environment={"GIVEN": "given"})
    assert stdout.decode() == f"0022\na b given {ME}\nin"
    assert end == CallEnd(code=3)


@WHOLE
def test_text_of_python_runs_as_a_program(server: Path) -> None:
    program = """
import json, os, sys
print(json.dumps([__name__, sys.argv, sys.stdin.read(), os.environ["GIVEN"], os.getcwd()]))
sys.exit("a reason")
"""
    stdout, end = call(
        server, b"in", operation="interpret", program=program, argv=["name", "x"], environment={"GIVEN": "g"}, cwd="/"
    )
    assert json.loads(stdout) == ["__main__", ["name", "x"], "in", "g", "/"]
    assert end == CallEnd(code=1)


@WHOLE
def test_files_are_read_and_written_with_errnos(server: Path, tmp_path: Path) -> None:
    path = str(tmp_path / "new" / "file")
    assert call(server, b"data", operation="write", path=path, mode=0o600) == (b"", CallEnd(code=0))
    assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600
    assert call(server, operation="read", path=path, limit_bytes=4) == (b"data", CallEnd(code=0))
    assert call(server, operation="read", path=path, limit_bytes=3)[1] == CallEnd(code=27)
    assert call(server, operation="read", path="/tmp", limit_bytes=3)[1] == CallEnd(code=21)
    assert call(server, operation="read", path=path, limit_bytes=4, remove=True) == (b"data", CallEnd(code=0))
    assert call(server, operation="read", path=path, limit_bytes=4)[1] == CallEnd(code=2)
    assert call(server, operation="read", path="/dev/zero", limit_bytes=4)[1] == CallEnd(code=22)


def test_the_server_keeps_the_time_limit(server: Path) -> None:
    assert call(server, argv=["sleep", "300"], timeout_seconds=0.3) == (b"", CallEnd(timed_out=True))


@WHOLE
def test_a_process_in_the_background_is_not_waited_for(server: Path) -> None:
    stdout, end = call(server, argv=["sh", "-c", "sleep 60 & echo $!"])
    os.kill(int(stdout), 9)
    assert end == CallEnd(code=0)


def test_a_command_ends_with_its_channel(server: Path) -> None:
    with connected(server) as channel:
        request = {"operation": "execute", "user": ME, "argv": ["sh", "-c", "echo $$; sleep 60; true"]}
        channel.sendall(frame(REQUEST, json.dumps(request).encode()))
        heard, pid = Answers(), b""
        while not pid:
            pid = b"".join(piece for _, piece in heard.feed(channel.recv(1 << 16), 0))
    until(lambda: not Path(f"/proc/{int(pid)}").exists())


@WHOLE
@pytest.mark.parametrize(
    "sent",
    [
        frame(STDIN, b"early"), frame(REQUEST, b"["), frame(REQUEST, b"[]"), frame(REQUEST, b'{"operation": "other"}'),
        frame(REQUEST, b'{"operation": "execute", "argv": []}'), header(REQUEST, 1 << 30), frame(STDOUT, b"x"),
        frame(REQUEST, b'{"operation": "execute", "argv": ["true\\u0000"]}'), b"\0" * HEADER.size,
    ],
    ids=["input", "half", "list", "operation", "no-command", "long", "output", "null", "zeros"],
)  # fmt: skip
def test_what_is_no_request_ends_the_call_and_not_the_server(server: Path, sent: bytes) -> None:
    with connected(server) as channel:
        channel.sendall(sent)
        assert answers(channel) == (b"", None)
    assert call(server, argv=["true"]) == (b"", CallEnd(code=0))


@WHOLE
def test_fifty_calls_at_once(server: Path) -> None:
    with ThreadPoolExecutor(50) as pool:
        done = list(pool.map(lambda number: call(server, argv=["echo", str(number)]), range(50)))
    assert done == [(b"%d\n" % number, CallEnd(code=0)) for number in range(50)]


@WHOLE
def test_the_socket_is_open_to_its_owner_alone(server: Path) -> None:
    assert stat.S_IMODE(server.stat().st_mode) == 0o600


def test_a_user_may_be_named_by_number(server: Path) -> None:
    assert call(server, user=str(os.geteuid()), argv=["id", "-un"])[0].decode().strip() == ME


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become others")
def test_a_number_without_an_account_has_roots_group(server: Path) -> None:
    script = "id -u; id -g; id -G; pwd; echo $HOME $USER"
    stdout, _ = call(server, user="4242", argv=["sh", "-c", script])
    assert stdout.decode().split() == ["4242", "0", "0", "/", "/", "4242"]


@pytest.mark.parametrize("user", ["4294967295", "99999999999", "-1", "1.0", "²"])
def test_a_number_that_is_no_users_is_refused(server: Path, user: str) -> None:
    stdout, end = call(server, user=user, argv=["id", "-u"])
    assert stdout == b""
    assert end is not None
    assert (end.code, end.what) == (None, "user")
