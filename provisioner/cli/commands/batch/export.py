"""The command `batch export`: a batch's results in the format of another program."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from provisioner.base.errors import HostError, UsageError
from provisioner.batch.records import Batches
from provisioner.batch.report.evidence import gather
from provisioner.cli.commands.batch.lookup import BatchArgument, DatabaseOption, rows_of
from provisioner.cli.options import parse_path
from provisioner.cli.output import Result
from provisioner.store.environments import EnvironmentStore

INSTALL_HINT = (
    "It comes with provisioner's extra `inspect`: docs/how-to/batches.md#open-the-results-in-inspect has the command."
)


def main(
    batch: BatchArgument,
    inspect: Annotated[
        bool, typer.Option("--inspect", help="As logs of Inspect AI, one for each family and agent.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="DIR", help="Where to write them; default: the batch's.", parser=parse_path),
    ] = None,
    database: DatabaseOption = "",
) -> Result:
    """Writes logs that `inspect view` opens."""
    if not inspect:
        raise UsageError("The format is missing.", hint="--inspect writes logs of Inspect AI.")
    try:
        from provisioner.inspect.batch_logs import write_logs
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "inspect_ai":
            raise
        raise HostError("Inspect AI is not installed.", hint=INSTALL_HINT) from error
    home, record, rows = rows_of(batch, database)
    if not rows:
        raise UsageError(f"No run of {record.id} has ended yet.")
    directory = (output or Batches(home).directory(record.id) / "inspect").absolute()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        paths = write_logs(record, rows, gather(EnvironmentStore(home), record.id, rows), directory)
    except OSError as error:
        raise UsageError(f"{directory} cannot be written to: {error.strerror}.") from error
    logs = [str(path) for path in paths]
    text = "\n".join([*logs, "", f"inspect view --log-dir {directory}"])
    return Result({"batch": record.id, "directory": str(directory), "logs": logs, "ended": len(rows)}, text)
