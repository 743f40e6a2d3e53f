"""Finds the descendants of a process."""

from __future__ import annotations

import contextlib
from pathlib import Path


def descendants(pid: int, name: str) -> list[int]:
    """Returns the descendants of a process that run a program with this name."""
    mine: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # processes may end meanwhile
            for child in map(int, task.read_text().split()):
                if Path(f"/proc/{child}/comm").read_text().strip() == name:
                    mine.append(child)
                mine += descendants(child, name)
    return mine
