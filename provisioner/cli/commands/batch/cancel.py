"""The command `batch cancel`."""

from __future__ import annotations

import contextlib
from typing import Annotated

import typer

from provisioner.base.errors import InfrastructureError, ProvisionerError, StillThereError
from provisioner.batch.records import Batch, Batches
from provisioner.batch.rows import unreadable_of
from provisioner.batch.worker import open_client
from provisioner.cli.commands.batch.lookup import (
    BatchArgument,
    DatabaseOption,
    find_batch,
    has_controller,
    states_and_rows,
)
from provisioner.cli.output import Result
from provisioner.cli.sessions import session, session_of
from provisioner.environment import lifecycle
from provisioner.store.files import is_locked


def main(
    batch: BatchArgument,
    force: Annotated[bool, typer.Option("--force", help="Stop the active runs, too.")] = False,
    database: DatabaseOption = "",
) -> Result:
    """Cancels the runs of a batch that have not begun, until the batch is resumed."""
    home, record, database = find_batch(batch, database)
    states, _ = states_and_rows(home, record, database)
    # In a batch's first seconds its controller is still queueing the runs. It cancels what was noted before.
    over: set[str] = set()
    with contextlib.suppress(InfrastructureError):
        over = {row.key for row in Batches(home).results(record)}  # the queue may be gone
    by_key = {run.key: states.get(run.key) for run in record.runs if run.key in states or run.key not in over}
    stoppable = ("queued", "running") if force else ("queued",)
    chosen = [key for key, state in by_key.items() if state is None or state.state in stoppable]
    # A worker that is being stopped has cancelled its runs by itself. It requeues them unless they are cancelled again.
    requeued = [key for key, state in states.items() if state.state == "cancelled"]
    if chosen or requeued:
        Batches(home).note_cancelled(record, [*chosen, *requeued])
    if states:
        with contextlib.closing(open_client(home, record, database)) as client:
            client.cancel(record.id, [key for key in (*chosen, *requeued) if key in states])
    attended = has_controller(home, record)
    removed, problems = _remove_orphans(record) if force and not attended else ([], [])
    running = sum(state.state == "running" for state in states.values())
    text = f"{record.id}: {len(chosen)} runs cancelled."
    if running and not force:
        text += f" {running} are still running; --force stops them."
    elif running and attended:
        stopping = (
            "Their workers, if alive, stop them and clean up"
            if record.shared
            else "Their controller stops them and cleans up"
        )
        text += f" {running} are still running. {stopping}: provisioner batch status {record.id}"
    if removed:
        text += f" Removed: {', '.join(removed)}."
    if problems:
        raise StillThereError(f"{text} Not removed: {'; '.join(problems)}", hint="`provisioner sweep` tries again.")
    return Result({"batch": record.id, "cancelled": chosen, "removed": removed}, text)


def _remove_orphans(batch: Batch) -> tuple[list[str], list[str]]:
    """Destroys what a killed controller left; returns the ids of what is gone, and what could not be removed."""
    opened = session()
    removed, problems = [], []
    for environment in opened.environments.readable():
        if environment.batch != batch.id or is_locked(opened.environments.lease(environment.id)):
            continue
        try:
            lifecycle.destroy(session_of(environment, opened), environment)
            removed.append(environment.id)
        except ProvisionerError as error:
            problems.append(error.message)
    problems += [f"{error.message} {error.hint}" for error in unreadable_of(opened.environments, batch).values()]
    return removed, problems
