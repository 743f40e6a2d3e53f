"""Starts a machine's egress proxy, which outlives the process that starts it, and reads what it has counted.

Standard library only.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from provisioner.base import child_environment
from provisioner.clouds.local.vm.processes import is_alive, start_time

_LAYOUT = struct.Struct("<3Q")


@dataclass(frozen=True)
class Counts:
    """What a proxy has done so far.

    Args:
        denied: frames of the machine to addresses that no machine may reach; they were dropped.
        onward: connections to destinations of the allowlist.
        outside: connections whose other end is no destination of the allowlist. There must never be one.
    """

    denied: int = 0
    onward: int = 0
    outside: int = 0


class Counters:
    """The counters of this process.

    Args:
        path: the file; None keeps them in memory.
    """

    def __init__(self, path: Path | None) -> None:
        self._counts = Counts()
        if path is None:
            self._memory = mmap.mmap(-1, _LAYOUT.size)
            return
        with path.open("w+b") as file:
            file.write(bytes(_LAYOUT.size))
            file.flush()
            self._memory = mmap.mmap(file.fileno(), _LAYOUT.size)

    def frames_denied(self, total: int) -> None:
        """Sets how many frames were dropped so far."""
        if total != self._counts.denied:
            self._keep(replace(self._counts, denied=total))

    def connected(self, *, is_allowed: bool) -> None:
        """Counts one connection onward."""
        before = self._counts
        self._keep(replace(before, onward=before.onward + is_allowed, outside=before.outside + (not is_allowed)))

    def _keep(self, counts: Counts) -> None:
        self._counts = counts
        _LAYOUT.pack_into(self._memory, 0, counts.denied, counts.onward, counts.outside)


def read(path: Path) -> Counts:
    """Reads the counters of a proxy.

    Raises:
        OSError: there are none.
        ValueError: the file does not hold counters.
    """
    with path.open("rb") as file:
        data = file.read(_LAYOUT.size + 1)
    if len(data) != _LAYOUT.size:
        raise ValueError(f"{path.name} holds no counters")
    return Counts(*_LAYOUT.unpack(data))


# The egress proxy counts there (egress_counters.py).
COUNTERS = "network.counters"


def start(theirs: socket.socket, allowed: list[dict[str, Any]] | None) -> None:
    """Starts the egress proxy on one end of a socket pair; `allowed` None means the whole internet.

    It ends when QEMU closes the other end. Its pid is kept for `destroy` all the same.
    """
    arguments = ["--fd", str(theirs.fileno()), "--log", "network.log", "--counters", COUNTERS]
    if allowed is None:
        arguments.append("--full-internet")
    for destination in allowed or ():
        arguments += ["--allow", f"{destination['cidr']}:{destination['port']}"]
    pid = start_program("provisioner.clouds.local.network.egress_proxy", *arguments, pass_fds=(theirs.fileno(),))
    Path("network.json").write_text(json.dumps({"pid": pid, "started": start_time(pid)}))


def start_program(module: str, *arguments: str, pass_fds: tuple[int, ...] = ()) -> int:
    """Starts one of our programs in the machine's directory, to outlive this one, and returns its pid."""
    argv = [sys.executable, "-m", module, *arguments]
    null = subprocess.DEVNULL
    return subprocess.Popen(
        argv, stdin=null, stdout=null, stderr=null, start_new_session=True, pass_fds=pass_fds,
        env=child_environment.for_python(os.environ),
    ).pid  # fmt: skip


def pid_of(directory: Path) -> int | None:
    """Returns the pid of the machine's egress proxy; None if it has ended."""
    try:
        process = json.loads((directory / "network.json").read_text())
    except (OSError, ValueError):
        return None
    return int(process["pid"]) if is_alive(process["pid"], process["started"]) else None
