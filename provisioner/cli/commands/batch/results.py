"""What the runs of a batch came to, as a command's result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from provisioner.base.errors import BudgetError, InfrastructureError, Interrupted, UsageError
from provisioner.batch.records import Batch, Batches
from provisioner.batch.results import Row, by_task_and_agent, mean
from provisioner.cli.commands.batch.report import write_report
from provisioner.cli.output import Result, table
from provisioner.costs.prices import MICRO, dollars
from provisioner.store.home import Home


def final_result(home: Home, batch: Batch, rows: Sequence[Row], costs: tuple[int, int]) -> Result:
    """Writes the report of a batch whose runs have ended, and returns the command's result.

    The exit code tells whether runs failed through no fault of their task or agent.

    Args:
        costs: what is reserved and what is spent, each in millionths of a US dollar.
    """
    try:
        page, problem = write_report(home, batch, rows, None), ""
    except UsageError as error:  # the results are there, and count
        page, problem = None, error.message
    directory = Batches(home).directory(batch.id)
    outcomes = Counter(row.outcome for row in rows)
    exit_code = 0
    if outcomes["infrastructure_failed"]:
        exit_code = InfrastructureError.exit_code
    elif outcomes["over_budget"]:
        exit_code = BudgetError.exit_code
    elif outcomes["cancelled"]:
        exit_code = Interrupted.exit_code
    data = {
        **summary_data(batch, rows, costs),
        "results": str(directory / "results.jsonl"),
        "csv": str(directory / "results.csv"),
        "report": None if page is None else str(page),
    }
    spent = f", {dollars(costs[1])} spent" if batch.suite.is_billed else ""
    lines = [
        _score_table(rows), "", f"batch:   {batch.id}{spent}", f"results: {directory / 'results.csv'}",
        f"report:  {page or problem}",
    ]  # fmt: skip
    return Result(data, "\n".join(lines), exit_code)


def summary_data(batch: Batch, rows: Sequence[Row], costs: tuple[int, int]) -> dict[str, Any]:
    """Returns a batch and its rows as data for --json.

    Args:
        costs: what is reserved and what is spent, each in millionths of a US dollar.
    """
    reserved, spent = costs
    return {
        "batch": batch.id,
        "suite": batch.suite.name,
        "runs": len(batch.runs),
        "ended": len(rows),
        "outcomes": dict(Counter(row.outcome for row in rows)),
        "reserved_usd": reserved / MICRO,
        "spent_usd": spent / MICRO,
        "rows": [row.model_dump(mode="json") for row in rows],
    }


def _score_table(rows: Sequence[Row]) -> str:
    """Returns a table of mean scores, with a line per task and agent."""
    lines = []
    for (task, agent), group in by_task_and_agent(rows).items():
        score = mean([row.score for row in group if row.score is not None])
        counts = Counter(row.outcome for row in group)
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
        lines.append([task, agent, str(len(group)), str(score or "-"), outcomes])
    return table(["TASK", "AGENT", "RUNS", "MEAN ± STDERR", "ENDED AS"], lines)
