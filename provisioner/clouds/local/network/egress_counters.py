"""Counts what an egress proxy refused and connected, where the controller can read it. Standard library only.

The counters lie in a small file of fixed size that the proxy maps into its memory: counting costs no system call, and
the file never grows, whatever the machine sends.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass, replace
from pathlib import Path

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
