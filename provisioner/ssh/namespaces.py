"""Opens sockets that connect from within another process's network namespace, where a local machine's sshd listens."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

from provisioner.base import child_environment
from provisioner.base.printable import last_lines
from provisioner.ssh.namespace_program import holder

PROGRAM = Path(__file__).with_name("namespace_program.py")
# One process opens this many, as a machine that boots is tried many times.
SOCKETS_AT_ONCE = 16
PROGRAM_SECONDS = 15.0


class Sockets:
    """Opens TCP sockets, in this process's network or in that of another.

    Args:
        pidfile: a file that the other process locks; None for this process's own network.
    """

    def __init__(self, pidfile: Path | None = None) -> None:
        self._pidfile = pidfile
        self._unused: list[socket.socket] = []

    def close(self) -> None:
        """Closes the sockets that were not used."""
        for each in self._unused:
            each.close()

    def connect(self, host: str, port: int, timeout_seconds: float) -> socket.socket:
        """Opens a connection. In another process's network it may still be on its way.

        Raises:
            OSError: nothing listens there, or the other process has ended.
        """
        if self._pidfile is None:
            opened = socket.create_connection((host, port), timeout_seconds)
            # A call is made of small messages. None waits until the machine has acknowledged the one before, which
            # Linux may delay by 40 ms (TCP_DELACK_MIN). namespace_program.py sets it inside.
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return opened
        if not self._unused:
            self._unused = _open_sockets(self._pidfile)
        opened = self._unused.pop()
        try:
            opened.setblocking(False)
            number = opened.connect_ex((host, port))
            if number not in (0, errno.EINPROGRESS):
                raise OSError(number, os.strerror(number))
        except BaseException:
            opened.close()
            raise
        return opened


def is_held(pidfile: Path) -> bool:
    """Returns whether a process locks a pidfile. No connection tells that a network has gone with its process."""
    try:
        return bool(holder(str(pidfile)))
    except OSError as error:  # too many open files say nothing about the process
        return error.errno in (errno.EMFILE, errno.ENFILE)


def _open_sockets(pidfile: Path) -> list[socket.socket]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        try:
            done = subprocess.run(
                _argv(pidfile, str(SOCKETS_AT_ONCE)),
                stdin=subprocess.DEVNULL,
                stdout=theirs.fileno(),
                stderr=subprocess.PIPE,
                env=child_environment.for_program(os.environ),
                timeout=PROGRAM_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ConnectionError("the machine's network could not be entered in time") from error
        if done.returncode != 0:
            raise ConnectionError(last_lines(done.stderr.decode(errors="replace"), 300))
        _, descriptors, _, _ = socket.recv_fds(ours, 1, SOCKETS_AT_ONCE)
    return [socket.socket(fileno=descriptor) for descriptor in descriptors]


def proxy_command(pidfile: Path, host: str, port: int) -> list[str]:
    """Returns the command that connects for OpenSSH, with its option ProxyUseFdpass."""
    return _argv(pidfile, host, str(port))


def _argv(pidfile: Path, *wanted: str) -> list[str]:
    return [sys.executable, "-I", "-S", str(PROGRAM), str(pidfile), *wanted]
