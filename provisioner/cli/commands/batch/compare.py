"""The command `batch compare`: how two batches differ, by the tasks and agents that both have scores for."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from provisioner.batch.comparison import Comparison, Pair, compare_batches
from provisioner.batch.intervals import Estimate
from provisioner.cli.commands.batch.lookup import DatabaseOption, batch_ids, rows_of
from provisioner.cli.output import Result, table
from provisioner.errors import UsageError

# How many names of what only one batch has are shown.
MAX_NAMED = 10


def _batch_argument(metavar: str, what: str) -> Any:
    text = f"Id of the {what} batch, or its beginning or end."
    return typer.Argument(metavar=metavar, help=text, autocompletion=batch_ids, show_default=False)


def compare(
    first: Annotated[str, _batch_argument("A", "first")],
    second: Annotated[str, _batch_argument("B", "second")],
    database: DatabaseOption = "",
) -> Result:
    """Shows how much greater the second batch's means are than the first's, pair by pair and together."""
    (_, batch_1, rows_1), (_, batch_2, rows_2) = rows_of(first, database), rows_of(second, database)
    found = compare_batches(rows_1, rows_2)
    if found.overall is None:
        raise UsageError(
            f"{batch_1.id} and {batch_2.id} have no task and agent in common that have scores in both.",
            hint="They are paired by the names of family, task and agent.",
        )
    data = {
        "first": batch_1.id,
        "second": batch_2.id,
        "pairs": [_pair_data(pair) for pair in found.overall.pairs],
        "overall": _together_data(found.overall),
        "by_agent": {agent: _together_data(each) for agent, each in found.by_agent.items()},
        "only_first": list(found.only_first),
        "only_second": list(found.only_second),
    }
    lines = [
        f"A: {batch_1.id}",
        f"B: {batch_2.id}",
        "",
        table(
            ["TASK", "AGENT", "A", "95 %", "B", "95 %", "B - A", "95 %"], [_line(pair) for pair in found.overall.pairs]
        ),
        "",
        *(_sentence(f"{agent}: ", each) for agent, each in found.by_agent.items() if len(found.by_agent) > 1),
        _sentence("B - A over all: ", found.overall),
        *_only("A", found.only_first),
        *_only("B", found.only_second),
    ]
    return Result(data, "\n".join(lines))


def _line(pair: Pair) -> list[str]:
    first, second, gap = pair.first, pair.second, pair.difference
    cells = [f"{first.mean:.2f}", _interval(first), f"{second.mean:.2f}", _interval(second)]
    return [pair.task, pair.agent, *cells, f"{gap.mean:+.2f}", _interval(gap, "+")]


def _interval(mean: Estimate, sign: str = "") -> str:
    if mean.low is None or mean.high is None:
        return "-"
    return f"{mean.low:{sign}.2f} to {mean.high:{sign}.2f}"


def _sentence(begin: str, found: Comparison) -> str:
    interval = _interval(found.difference, "+")
    certain = f" (95 %: {interval})" if interval != "-" else ""
    counts = f"{found.better} better, {found.equal} equal, {found.worse} worse"
    return f"{begin}{found.difference.mean:+.2f}{certain}; {counts}."


def _only(batch: str, names: tuple[str, ...]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return [f"Only in {batch}: {'; '.join(names[:MAX_NAMED])}{more}."]


def _pair_data(pair: Pair) -> dict[str, Any]:
    parts = {"first": pair.first, "second": pair.second, "difference": pair.difference}
    return {"task": pair.task, "agent": pair.agent, **{name: asdict(part) for name, part in parts.items()}}


def _together_data(found: Comparison) -> dict[str, Any]:
    counts = {"better": found.better, "equal": found.equal, "worse": found.worse}
    return {"pairs": len(found.pairs), "difference": asdict(found.difference), **counts}
