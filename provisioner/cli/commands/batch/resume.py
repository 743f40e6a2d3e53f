"""The command `batch resume`."""

from __future__ import annotations

from pathlib import Path

from provisioner.cli.commands.batch.controller import run_batch
from provisioner.cli.commands.batch.lookup import BatchArgument, DatabaseOption, batch_context, find_batch
from provisioner.cli.output import Result


def main(batch: BatchArgument, database: DatabaseOption = "") -> Result:
    """Works on the runs of a batch that have not ended, each from its last finished step."""
    _, record, database = find_batch(batch, database)
    context = batch_context(record.suite, Path(record.suite_file), record.id, database)
    return run_batch(record, context, resumed=True)
