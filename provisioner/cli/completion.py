"""Finds what the shell's completion offers. Prints nothing, raises nothing and runs nothing of a family's.

Shells evaluate what they are offered: a name from a family's text is offered only if it means the same to all of them.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import typer

from provisioner.base.progress import SURVIVABLE
from provisioner.clouds.registry import CLOUDS
from provisioner.store.home import Home

# Neither quotes nor expansions nor options in bash, zsh or fish.
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


def environment_ids(incomplete: str) -> list[str]:
    """Returns ids of environments that exist."""
    with contextlib.suppress(OSError, RuntimeError):
        return _ids(Home.default().environments, incomplete)
    return []


def path_beginnings(incomplete: str) -> list[str]:
    """Returns the beginnings of paths in environments that exist; none if a file here begins so.

    Shells complete files themselves, but only where they are offered nothing. After a single match they add a space, so
    that each environment has two: there they stop at the colon.
    """
    with contextlib.suppress(OSError):
        if not any(path.name.startswith(incomplete) for path in Path().iterdir()):
            return [f"{name}:{path}" for name in environment_ids(incomplete) for path in ("", "/")]
    return []


def all_environment_ids(incomplete: str) -> list[str]:
    """Returns ids of environments, including those of destroyed ones."""
    with contextlib.suppress(OSError, RuntimeError):
        return sorted({*environment_ids(incomplete), *_ids(Home.default().archive, incomplete)})
    return []


def cloud_names(incomplete: str) -> list[str]:
    """Returns the names of clouds."""
    return [name for name in CLOUDS if name.startswith(incomplete)]


def task_names(context: typer.Context, incomplete: str) -> list[str]:
    """Returns the tasks of the family that the command line names, if the family's text tells them all."""
    with contextlib.suppress(*SURVIVABLE):
        return [name for name in _tasks(Path(context.params["family"])) if name.startswith(incomplete)]
    return []


def _tasks(family: Path) -> list[str]:
    from provisioner.family.findings import task_names  # which take long to import
    from provisioner.family.loader import load_family
    from provisioner.family.source import read_source

    source = read_source(load_family(family.expanduser()).module)
    return [name for name in (source and task_names(source)) or () if _PLAIN.fullmatch(name)]


def _ids(directory: Path, incomplete: str) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.is_dir() and path.name.startswith(incomplete))
