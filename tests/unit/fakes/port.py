"""A machine's virtio-serial port: the socket that QEMU would hold, with both of its ends."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from provisioner.clouds.local.vm import qemu
from provisioner.clouds.local.vm.credential_port import CredentialPort
from tests.waiting import BOUND_SECONDS


@contextlib.contextmanager
def connected(machine: Path) -> Iterator[tuple[CredentialPort, socket.socket]]:
    """Yields the host's end of a port, and the machine's.

    Args:
        machine: the machine's directory.
    """
    (machine / qemu.RUN).mkdir()
    directory = os.open(machine, os.O_PATH)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"/proc/self/fd/{directory}/{qemu.PORT}")
        os.close(directory)
        server.listen()
        port = CredentialPort(machine)
        assert port.connect()
        with server.accept()[0] as theirs:
            theirs.settimeout(BOUND_SECONDS)
            yield port, theirs
            port.close()
