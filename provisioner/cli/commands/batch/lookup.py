"""Finds batches and the rows of their runs, for the commands of the group `batch`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from provisioner.base.clock import now
from provisioner.base.config import load_settings
from provisioner.base.errors import InfrastructureError, UsageError
from provisioner.batch.context import BatchContext
from provisioner.batch.queue import RunState
from provisioner.batch.records import Batch, Batches
from provisioner.batch.results import Row
from provisioner.batch.rows import collect_rows
from provisioner.batch.suite import Suite
from provisioner.batch.worker import open_client
from provisioner.cli.command import default_home, progress
from provisioner.cli.options import DATABASE_VARIABLE, parse_database
from provisioner.cli.sessions import session
from provisioner.store.files import is_locked
from provisioner.store.home import Home

# How long a new batch may wait for its controller, which writes the batch's record before it makes its queue.
STARTING = timedelta(seconds=30)


def batch_ids(incomplete: str) -> list[str]:
    """Returns the ids that begin with a text, for the shell's completion."""
    with contextlib.suppress(OSError, RuntimeError):
        return sorted(path.name for path in Home.default().batches.iterdir() if path.name.startswith(incomplete))
    return []


BatchArgument = Annotated[
    str, typer.Argument(metavar="BATCH", help="Id of the batch, or its beginning or end.", autocompletion=batch_ids)
]
DatabaseOption = Annotated[
    str,
    typer.Option(
        "--database",
        metavar="URL",
        envvar=DATABASE_VARIABLE,
        help="postgresql://... that several workers share. Default: a file of the batch.",
        parser=parse_database,
    ),
]


def find_batch(name: str, database: str) -> tuple[Home, Batch, str]:
    """Returns the home, the batch that a name means, and the URL of the database with the batch's queue.

    The URL is empty if the queue is the batch's own file, whatever the operator's environment says.
    """
    home = default_home()
    batch = Batches(home).find(name)
    if batch.shared and not database:
        raise UsageError(
            f"The queue of {batch.id} is in a database.", hint="Name it with --database or PROVISIONER_DATABASE."
        )
    return home, batch, database if batch.shared else ""


def batch_context(suite: Suite, file: Path, batch: str, database: str = "") -> BatchContext:
    """Returns what this process needs to work on a batch.

    Args:
        file: the suite file, to whose directory the suite's paths are relative.
    """
    settings = load_settings()
    return BatchContext(default_home(), settings, suite, file.parent, batch, database=database, progress=progress())


def rows_of(name: str, database: str) -> tuple[Home, Batch, list[Row]]:
    """Returns the home, the batch that a name means, and the rows of its runs that have ended.

    Of a batch whose queue is gone, as when only its results were kept, they are those of results.jsonl.
    """
    home, batch, database = find_batch(name, database)
    _, rows = states_and_rows(home, batch, database)
    return home, batch, rows or Batches(home).results(batch)


def has_controller(home: Home, batch: Batch) -> bool:
    """Whether a process is working on a batch; taken for granted if its queue is shared."""
    return batch.shared or is_locked(Batches(home).lock(batch.id))


def ended(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows of runs that `resume` would not run again."""
    return [row for row in rows if row.outcome != "cancelled"]


def states_and_rows(home: Home, batch: Batch, database: str) -> tuple[dict[str, RunState], list[Row]]:
    """Reads the states of a batch's runs, and the rows of those that have ended."""
    queue = Batches(home).directory(batch.id) / "engine.sqlite"
    if not database and not queue.exists():
        return {}, []
    ledger = session(database=database).ledger
    with contextlib.ExitStack() as opened:
        try:
            client = opened.enter_context(contextlib.closing(open_client(home, batch, database)))
            states = client.states(batch.id)
        except InfrastructureError:
            if database or abs(now() - batch.created_at) > STARTING:
                raise
            return {}, []  # a new batch's controller is still making the queue
        outputs = partial(client.outputs, batch.id)
        return states, collect_rows(batch, states, {}, outputs, ledger, Batches(home).cancelled(batch))
