"""Lists what was recorded of an environment: the terminals by their times, and the tables."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from provisioner.recording import casts, tables
from provisioner.recording.calls import CALLS


@dataclass(frozen=True)
class Parts:
    """The files of a recording that `provisioner replay` shows."""

    terminals: tuple[Path, ...]
    tables: tuple[Path, ...]

    @property
    def names(self) -> list[str]:
        """The parts' names, as `replay --part` takes them."""
        return [path.stem for path in (*self.terminals, *self.tables)]


def parts_of(logs: Path) -> Parts:
    """Returns what was recorded among an environment's logs."""
    terminals = sorted(logs.glob(f"*{casts.SUFFIX}"), key=lambda path: (_begin(path), path.stem))
    lists = sorted(path for pattern in (CALLS, tables.NETWORKS) for path in logs.glob(pattern))
    return Parts(tuple(terminals), tuple(lists))


def _begin(path: Path) -> int:
    try:
        return casts.header_of(path).timestamp
    except (OSError, casts.DamagedCastError):
        return 0
