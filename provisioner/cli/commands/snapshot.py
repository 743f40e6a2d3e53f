"""The commands `snapshot list` and `snapshot remove`."""

from __future__ import annotations

from typing import Annotated

import typer

from provisioner.cli.commands.freeze import snapshot_data
from provisioner.cli.output import Result, table
from provisioner.cli.sessions import session
from provisioner.environment import snapshots
from provisioner.store.snapshots import SnapshotStore


def list_snapshots() -> Result:
    """Lists all snapshots."""
    store = SnapshotStore(session().home)
    listed = [snapshot_data(store, snapshot) for snapshot in store.all()]
    rows = [
        [
            each["name"],
            each["frozen_at"][:19],
            each["of"],
            each["family"],
            each["task"],
            f"{each['bytes'] / 1e6:,.0f} MB",
        ]
        for each in listed
    ]
    return Result({"snapshots": listed}, table(["NAME", "FROZEN AT", "OF", "FAMILY", "TASK", "DISK"], rows))


def remove(names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Names of snapshots.")]) -> Result:
    """Removes snapshots."""
    opened = session()
    for name in names:
        snapshots.remove(opened, name)
    return Result({"removed": names}, "\n".join(f"{name}: removed" for name in names))


COMMANDS = {"list": (list_snapshots, "List snapshots."), "remove": (remove, "Remove snapshots.")}
