"""Tells one process from a later one with the same number, and gives those beside a machine a user of their own.

Standard library only.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from dataclasses import dataclass
from pathlib import Path


def start_time(pid: int) -> str | None:
    """Returns a process's start time in clock ticks, which with its number identifies it; None if it has ended."""
    try:
        return _stat(pid)[19]  # field 22
    except OSError:
        return None


def is_alive(pid: int, started: str) -> bool:
    """Returns whether a process lives, if only by one of its threads.

    Args:
        pid, started: its number and its start time.
    """
    try:
        fields = _stat(pid)
    except OSError:
        return False
    # A process looks like a zombie once its first thread has exited, even if others run: fields 3 and 20.
    return fields[19] == started and (fields[0] not in ("Z", "X") or int(fields[17]) > 1)


def is_stopped(pid: int) -> bool:
    """Returns whether a signal has stopped a process until another one continues it."""
    try:
        return _stat(pid)[0] == "T"
    except OSError:
        return False


def _stat(pid: int) -> list[str]:
    """Returns the fields of proc(5)'s /proc/PID/stat from the third one on; before that is a name, of any bytes."""
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()


# systemd, "Users, Groups, UIDs and GIDs on systemd Systems": unused by anything, and within 31 bits.
FIRST, LAST = 0x70000000, 0x7FFDFFFF
# The user nobody and its group, in user namespaces that map nothing so high.
NOBODY = 65534


@dataclass(frozen=True)
class User:
    """A user and a group without names."""

    uid: int
    gid: int


def own_user(environment: Path, maps: Path = Path("/proc/self")) -> User | None:
    """Returns a new user, in the group of an environment's processes; None unless this process is root.

    Args:
        environment: its directory.
        maps: directory with uid_map and gid_map, as user_namespaces(7) describes them.
    """
    if os.geteuid() != 0:
        return None
    group = int.from_bytes(hashlib.sha256(bytes(environment.resolve())).digest()[:8], "big")
    wanted = User(FIRST + secrets.randbelow(LAST - FIRST + 1), FIRST + group % (LAST - FIRST + 1))
    mapped = _maps_all((maps / "uid_map").read_text()) and _maps_all((maps / "gid_map").read_text())
    return wanted if mapped else User(NOBODY, NOBODY)


def _maps_all(text: str) -> bool:
    """Whether a line of the map (first id inside, first id outside, count) covers all our ids."""
    lines = [[int(word) for word in line.split()] for line in text.splitlines()]
    return any(inside <= FIRST and inside + count > LAST for inside, _, count in lines)
