"""Opens a channel to a machine's exec server, or runs the server for one call in a machine that has none yet.

A machine whose server is gone for good counts as lost: it gets no other.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import paramiko

from provisioner.ssh.bounded_transport import BoundedTransport
from provisioner.ssh.calls import SOCKET, NoServerError

GUEST = Path(__file__).parent.parent / "guest"
# The service's file: a machine that has it runs the server, or did.
SERVICE = "/etc/systemd/system/provisioner-exec.service"
# How long a server may take to start, once: systemd starts one again that ended.
START_SECONDS = 30.0
PAUSE_SECONDS = 0.5
# What a server imports: packages, and after them the modules that import only those before them.
MODULES = (
    "provisioner_guest/__init__.py",
    "provisioner_guest/login.py",
    "provisioner_guest/cgroup.py",
    "provisioner_guest/exec/__init__.py",
    "provisioner_guest/exec/start.py",
    "provisioner_guest/exec/container.py",
    "provisioner_guest/exec/call.py",
)
# Reads the server's modules, whose length in bytes comes first, and serves what follows on stdin.
LOADER = """
import json, os, sys, types
def read(size):
    data = b""
    while len(data) < size:
        piece = os.read(0, size - len(data))
        if not piece:
            sys.exit(1)
        data += piece
    return data
for path, text in json.loads(read(int(read(8)))):
    name = path.replace("/__init__.py", "").replace(".py", "").replace("/", ".")
    module = types.ModuleType(name)
    module.__file__ = "/nowhere/" + path
    module.__path__ = []
    sys.modules[name] = module
    exec(compile(text, path, "exec"), module.__dict__)
module.Call(0, 1).serve()
os._exit(0)
"""


def open_call(
    transport: BoundedTransport, answer_seconds: float, check_in_time: Callable[[], None]
) -> tuple[paramiko.Channel, bytes]:
    """Opens a channel for one call.

    Args:
        answer_seconds: how long each of sshd's answers may take.
        check_in_time: called before each attempt; raises to end the wait for a server that is being started again.

    Returns:
        the channel, and what to send on it before the request.

    Raises:
        NoServerError: its server has ended for good.
        paramiko.SSHException: the connection broke, or sshd does not answer in time.
        Exception: `check_in_time` raised it.
    """
    deadline = time.monotonic() + START_SECONDS
    while True:
        check_in_time()
        begin = time.monotonic()
        try:
            return transport.open_unix_socket(SOCKET, answer_seconds), b""
        except paramiko.SSHException:
            if not transport.is_active() or time.monotonic() - begin > answer_seconds:
                raise
        if not _has_server(transport, answer_seconds):
            return _own_server(transport, answer_seconds)
        if time.monotonic() > deadline:
            raise NoServerError("its exec server has ended.")
        time.sleep(PAUSE_SECONDS)


def close_call(channel: paramiko.Channel) -> None:
    """Closes a call's channel. Output may arrive at the same moment.

    paramiko closes the pipe behind `fileno` while its own thread may be writing to it, which breaks the connection of
    all calls, or writes into whatever file has the number next (paramiko's issue 2271). So nothing writes to it first.
    """
    for buffer in (channel.in_buffer, channel.in_stderr_buffer):
        buffer.set_event(threading.Event())
    channel.close()


def _has_server(transport: BoundedTransport, answer_seconds: float) -> bool:
    with _session(transport, f"test -e {SERVICE}", answer_seconds) as channel:
        if not channel.status_event.wait(answer_seconds):
            raise paramiko.SSHException("sshd does not say how a command ended")
        return channel.exit_status == 0


def _own_server(transport: BoundedTransport, answer_seconds: float) -> tuple[paramiko.Channel, bytes]:
    """Starts a server for one call, whose program is sent along."""
    channel = transport.open_session(timeout=answer_seconds)
    channel.exec_command(f"exec python3 -I -S -c '{LOADER}'")
    modules = json.dumps([(path, (GUEST / path).read_text()) for path in MODULES]).encode()
    return channel, b"%8d" % len(modules) + modules


@contextlib.contextmanager
def _session(transport: BoundedTransport, command: str, answer_seconds: float) -> Iterator[paramiko.Channel]:
    channel = transport.open_session(timeout=answer_seconds)
    try:
        channel.exec_command(command)
        yield channel
    finally:
        channel.close()
