"""Processes under another one."""

from __future__ import annotations

import contextlib
from pathlib import Path


def descendants(pid: int, name: str) -> list[int]:
    """The descendants of a process with a program's name."""
    mine: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # processes end while we look
            for child in map(int, task.read_text().split()):
                if Path(f"/proc/{child}/comm").read_text().strip() == name:
                    mine.append(child)
                mine += descendants(child, name)
    return mine
