"""A QMP server in a machine's directory: one client, one answer for each command."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def serving(directory: Path, answers: Mapping[str, Any]) -> Iterator[None]:
    """Listens as QEMU does, and serves one client.

    Args:
        directory: the machine's.
        answers: what each command returns; others return nothing.
    """
    with socket.socket(socket.AF_UNIX) as server:
        _bind(server, directory)
        server.listen()
        thread = threading.Thread(target=_serve, args=(server, answers), daemon=True)
        thread.start()
        yield
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)  # nobody may have come
        thread.join(10)
        (directory / "qmp.sock").unlink()


def _bind(server: socket.socket, directory: Path) -> None:
    """Binds through the directory: the path of a Unix socket may have 107 bytes, a directory's more."""
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    try:
        server.bind(f"/proc/self/fd/{descriptor}/qmp.sock")
    finally:
        os.close(descriptor)


def _serve(server: socket.socket, answers: Mapping[str, Any]) -> None:
    try:
        client = server.accept()[0]
    except OSError:
        return
    with client, client.makefile("rwb") as stream:
        stream.write(b'{"QMP": {}}\n')
        stream.flush()
        while line := stream.readline():
            answer = answers.get(json.loads(line)["execute"], {})
            stream.write(json.dumps({"return": answer}).encode() + b"\n")
            stream.flush()
