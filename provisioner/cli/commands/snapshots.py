"""The commands `freeze`, `snapshot list` and `snapshot remove`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from provisioner.cli.command import command
from provisioner.cli.options import EnvironmentArgument
from provisioner.cli.output import Result, table
from provisioner.cli.sessions import environment_session, session
from provisioner.environment import snapshots
from provisioner.store.snapshots import Snapshot, SnapshotStore


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    command(app, "freeze")(freeze)
    group = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
    app.add_typer(group, name="snapshot")
    command(group, "list", help="List snapshots.")(list_snapshots)
    command(group, "remove", help="Remove snapshots.")(remove)


def freeze(
    env: EnvironmentArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the snapshot.", show_default=False)],
) -> Result:
    """Freezes an environment, which resumes afterwards."""
    opened, environment = environment_session(env)
    snapshot = snapshots.freeze(opened, environment, name)
    store = SnapshotStore(opened.home)
    text = f"{name}: {environment.id}, frozen, {store.disk_bytes(name) / 1e6:,.0f} MB\n\n"
    return Result(_data(store, snapshot), text + f"  provisioner up --from {name}            bring up a copy")


def list_snapshots() -> Result:
    """Lists all snapshots."""
    store = SnapshotStore(session().home)
    listed = [_data(store, snapshot) for snapshot in store.all()]
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


def _data(store: SnapshotStore, snapshot: Snapshot) -> dict[str, Any]:
    frozen = snapshot.environment
    return {
        "name": snapshot.name,
        "frozen_at": snapshot.frozen_at.isoformat(),
        "of": frozen.id,
        "family": frozen.family,
        "task": frozen.task or "-",
        "machines": {role: machine.image for role, machine in frozen.machines.items()},
        "needs": snapshot.needs,
        "bytes": store.disk_bytes(snapshot.name),
    }


def remove(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Names of snapshots.", show_default=False)],
) -> Result:
    """Removes snapshots."""
    opened = session()
    for name in names:
        snapshots.remove(opened, name)
    return Result({"removed": names}, "\n".join(f"{name}: removed" for name in names))
