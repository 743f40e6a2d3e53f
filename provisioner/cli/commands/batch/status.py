"""The command `batch status`: how far a batch has come, or all batches."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

import typer

from provisioner.base.errors import InfrastructureError
from provisioner.batch.context import batch_costs
from provisioner.batch.records import Batch, Batches
from provisioner.cli.command import default_home
from provisioner.cli.commands.batch.lookup import (
    DatabaseOption,
    batch_ids,
    ended,
    find_batch,
    has_controller,
    states_and_rows,
)
from provisioner.cli.commands.batch.results import summary_data
from provisioner.cli.commands.batch.view import row_line, summary
from provisioner.cli.output import Result, table
from provisioner.cli.sessions import session
from provisioner.store.home import Home


def main(
    batch: Annotated[
        str | None,
        typer.Argument(metavar="[BATCH]", help="Id of the batch, or its beginning or end.", autocompletion=batch_ids),
    ] = None,
    database: DatabaseOption = "",
) -> Result:
    """Reports a batch's progress, active runs, failures and costs; without a batch, lists all batches."""
    if batch is None:
        return _list_batches(default_home())
    home, record, database = find_batch(batch, database)
    states, rows = states_and_rows(home, record, database)
    costs = batch_costs(session(database=database).ledger, record.id)
    running = [state.key for state in states.values() if state.state == "running"]
    attended = has_controller(home, record)
    environments = {known.id: known for known in session().environments.readable() if known.batch == record.id}
    lines = [f"{record.id}: {', '.join(summary(record, states, rows, costs))}"]
    if not attended and len(ended(rows)) < len(record.runs):
        lines.append(f"No controller is working on it: provisioner batch resume {record.id}")
    lines += [f"  runs: {key}" for key in running]
    lines += [
        f"  environment: {environment.id} ({environment.status}), ends at {environment.expires_at:%H:%M} UTC"
        for environment in environments.values()
    ]
    lines += [f"  {row_line(record.suite, row)}" for row in rows if row.outcome != "scored"]
    data = {
        **summary_data(record, rows, costs),
        "at_work": attended,
        "states": dict(Counter(state.state for state in states.values())),
        "running": running,
        "environments": sorted(environments),
    }
    return Result(data, "\n".join(lines))


def _list_batches(home: Home) -> Result:
    batches = Batches(home).all()
    lines = [
        [
            batch.id,
            f"{_ended_count(home, batch)}/{len(batch.runs)}",
            f"{batch.created_at:%Y-%m-%d %H:%M}",
            "at work" if not batch.shared and has_controller(home, batch) else "-",
        ]
        for batch in batches
    ]
    data = [
        {"batch": batch.id, "runs": len(batch.runs), "created_at": batch.created_at.isoformat()} for batch in batches
    ]
    text = table(["BATCH", "ENDED", "CREATED (UTC)", "CONTROLLER"], lines) if batches else "No batch was run yet."
    return Result({"batches": data}, text)


def _ended_count(home: Home, batch: Batch) -> str:
    """Returns how many runs have ended, by the results; of results that cannot be read, which hide no others, `?`."""
    try:
        return str(len(ended(Batches(home).results(batch))))
    except InfrastructureError:
        return "?"
