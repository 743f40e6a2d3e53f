"""Finds the processes in which OpenSSH keeps connections to machines."""

from __future__ import annotations

from pathlib import Path


def keepers(directory: Path) -> list[int]:
    """Returns the OpenSSH clients that work in an environment's directory, also if it is gone."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            its_directory = str((process / "cwd").readlink()).removesuffix(" (deleted)")
            if its_directory == str(directory.resolve()) and (process / "comm").read_text() == "ssh\n":
                found.append(int(process.name))
        except OSError:  # it has ended
            continue
    return found
