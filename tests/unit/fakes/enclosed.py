"""A process that listens in a network namespace of its own, as QEMU does for a machine's sshd."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.ports import reserved_port

# Locks its pidfile as QEMU does. Says when it listens, and greets each visitor. It imports what it needs
# before it becomes another user, who may not be allowed to read the checkout; after that it is as open to others as if
# that user had started it.
PROGRAM = """
import ctypes, fcntl, os, socket, sys
from provisioner.clouds.local.vm import confinement
if len(sys.argv) > 3:
    user = int(sys.argv[3])
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    ctypes.CDLL(None).prctl(4, 1)  # PR_SET_DUMPABLE
pidfile = open(sys.argv[1], "w")
fcntl.lockf(pidfile, fcntl.LOCK_EX)
confinement.leave_network()
server = socket.create_server(("127.0.0.1", int(sys.argv[2])))
print("listens", flush=True)
while True:
    visitor, _ = server.accept()
    visitor.sendall(b"within")
    visitor.close()
"""


@contextlib.contextmanager
def listening(directory: Path, user: int | None = None) -> Iterator[tuple[Path, int]]:
    """Yields the process's pidfile, in the directory, and its port, on which nothing of the host listens.

    Args:
        user: the process's user and group, instead of this process's.
    """
    pidfile = directory / "qemu.pid"
    with reserved_port() as port:
        argv = [sys.executable, "-c", PROGRAM, str(pidfile), str(port), *([] if user is None else [str(user)])]
        with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
            assert process.stdout
            assert process.stdout.readline() == b"listens\n"
            yield pidfile, port
            process.kill()
