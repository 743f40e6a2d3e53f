"""The command `batch report`: the page about a batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from provisioner.base.errors import UsageError
from provisioner.batch.records import Batch, Batches
from provisioner.batch.report.evidence import gather
from provisioner.batch.report.page import render
from provisioner.batch.results import Row
from provisioner.cli.commands.batch.lookup import BatchArgument, DatabaseOption, find_batch, states_and_rows
from provisioner.cli.options import parse_path
from provisioner.cli.output import Result
from provisioner.store.environments import EnvironmentStore
from provisioner.store.files import is_locked, write_atomically
from provisioner.store.home import Home


def main(
    batch: BatchArgument,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Where to write it.", parser=parse_path)
    ] = None,
    database: DatabaseOption = "",
) -> Result:
    """Writes the page and the results of the runs that have ended by now."""
    home, record, database = find_batch(batch, database)
    _, rows = states_and_rows(home, record, database)
    # A controller that is working on the batch writes the results itself, and has newer ones.
    if not is_locked(Batches(home).lock(record.id)):
        Batches(home).write_results(record, rows, if_none_is_lost=True)
    rows = rows or Batches(home).results(record)  # the queue may be gone, as where only the results were kept
    page = write_report(home, record, rows, output)
    return Result({"batch": record.id, "report": str(page), "ended": len(rows)}, str(page))


def write_report(home: Home, batch: Batch, rows: Sequence[Row], output: Path | None) -> Path:
    """Writes the report, and returns its path.

    Args:
        output: where to write it; None: beside the results.

    Raises:
        UsageError: it cannot be written there.
    """
    page = (output or Batches(home).directory(batch.id) / "report.html").absolute()
    try:
        evidence = gather(EnvironmentStore(home), batch.id, rows)
        text = render(batch, rows, evidence)
        if page.exists() and not page.is_file():  # as /dev/stdout
            page.write_text(text, encoding="utf-8")
        else:
            write_atomically(page.resolve(), text, 0o644)
    except OSError as error:
        raise UsageError(f"{page} cannot be written: {error.strerror}.") from error
    return page
