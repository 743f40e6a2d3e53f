"""Gives the processes beside a machine a user of their own where the controller is root. Standard library only.

No account has that user's id, no file belongs to it, and no two machines have the same one: what breaks out of QEMU or
passt can read no file of root's, and can touch no other machine's processes. Only in a user namespace that maps few
ids, as in many containers, all machines share the user nobody.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

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
