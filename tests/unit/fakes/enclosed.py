"""A process that listens in a network namespace of its own, as QEMU does for a machine's sshd."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

# Says its port once it listens, and greets each visitor.
PROGRAM = """
import socket
from provisioner.clouds.local import confinement
confinement.leave_network()
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
while True:
    visitor, _ = server.accept()
    visitor.sendall(b"within")
    visitor.close()
"""


@contextlib.contextmanager
def listening(directory: Path) -> Iterator[tuple[Path, int]]:
    """Yields the process's pidfile, which is written to the directory, and its port."""
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE) as process:
        assert process.stdout
        port = int(process.stdout.readline())
        pidfile = directory / "qemu.pid"
        pidfile.write_text(f"{process.pid}\n")
        yield pidfile, port
        process.kill()
