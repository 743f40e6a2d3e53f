"""Connects to Unix sockets whose paths are longer than the kernel takes."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def connect(client: socket.socket, path: Path) -> None:
    """Connects through a descriptor of the socket: its path may have more than the kernel's 107 bytes.

    Raises:
        OSError: nothing listens there. A link, which a hostile program may have made, is not followed.
    """
    descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        client.connect(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
