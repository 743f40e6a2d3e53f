"""Finds what the shell's completion offers. Prints nothing and raises nothing."""

from __future__ import annotations

import contextlib
from pathlib import Path

from provisioner.store.home import Home


def environment_ids(incomplete: str) -> list[str]:
    """Returns ids of environments that exist."""
    with contextlib.suppress(OSError, RuntimeError):
        return _ids(Home.default().environments, incomplete)
    return []


def all_environment_ids(incomplete: str) -> list[str]:
    """Returns ids of environments, including those of destroyed ones."""
    with contextlib.suppress(OSError, RuntimeError):
        return sorted({*environment_ids(incomplete), *_ids(Home.default().archive, incomplete)})
    return []


def _ids(directory: Path, incomplete: str) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.is_dir() and path.name.startswith(incomplete))
