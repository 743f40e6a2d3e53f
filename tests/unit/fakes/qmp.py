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

from provisioner.clouds.local.vm.qemu import CONTROL, RUN
from tests.waiting import BOUND_SECONDS


@contextlib.contextmanager
def serving(directory: Path, answers: Mapping[str, Any]) -> Iterator[list[str]]:
    """Listens as QEMU does, serves one client, and yields the commands that it gets.

    Args:
        directory: the machine's.
        answers: what each command returns; others return nothing.
    """
    commands: list[str] = []
    with socket.socket(socket.AF_UNIX) as server:
        _bind(server, directory)
        server.listen()
        thread = threading.Thread(target=_serve, args=(server, answers, commands), daemon=True)
        thread.start()
        yield commands
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)  # no client may have come
        thread.join(BOUND_SECONDS)
        (directory / CONTROL).unlink()


def _bind(server: socket.socket, directory: Path) -> None:
    """Binds through the directory: the path of a Unix socket may have 107 bytes, a directory's more."""
    (directory / RUN).mkdir(exist_ok=True)
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    try:
        server.bind(f"/proc/self/fd/{descriptor}/{CONTROL}")
    finally:
        os.close(descriptor)


def _serve(server: socket.socket, answers: Mapping[str, Any], commands: list[str]) -> None:
    try:
        client = server.accept()[0]
    except OSError:
        return
    with client, client.makefile("rwb") as stream:
        stream.write(b'{"QMP": {}}\n')
        stream.flush()
        while line := stream.readline():
            commands.append(json.loads(line)["execute"])
            answer = answers.get(commands[-1], {})
            stream.write(json.dumps({"return": answer}).encode() + b"\n")
            stream.flush()
