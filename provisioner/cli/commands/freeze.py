"""The command `freeze`: makes a snapshot of an environment."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from provisioner.cli.options import EnvironmentArgument
from provisioner.cli.output import Result
from provisioner.cli.sessions import environment_session
from provisioner.environment import snapshots
from provisioner.store.snapshots import Snapshot, SnapshotStore


def main(
    env: EnvironmentArgument, name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the snapshot.")]
) -> Result:
    """Freezes an environment, which resumes afterwards."""
    opened, environment = environment_session(env)
    snapshot = snapshots.freeze(opened, environment, name)
    store = SnapshotStore(opened.home)
    text = f"{name}: {environment.id}, frozen, {store.disk_bytes(name) / 1e6:,.0f} MB\n\n"
    return Result(snapshot_data(store, snapshot), text + f"  provisioner up --from {name}            bring up a copy")


def snapshot_data(store: SnapshotStore, snapshot: Snapshot) -> dict[str, Any]:
    """Returns what --json has of a snapshot."""
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
