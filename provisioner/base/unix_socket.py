"""Connects to Unix sockets whose paths are longer than the kernel takes."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def connect(client: socket.socket, path: Path) -> None:
    """Connects through the socket's directory: the path of a Unix socket may have 107 bytes, a directory's more.

    Raises:
        OSError: nothing listens there.
    """
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        client.connect(f"/proc/self/fd/{directory}/{path.name}")
    finally:
        os.close(directory)
