"""What `batch plan` says: the runs of a suite and their worst case, from forecasts. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from provisioner.batch.context import TaskForecast
from provisioner.batch.suite import Suite
from provisioner.cli.output import Result, table
from provisioner.costs.prices import MICRO, dollars
from provisioner.models import MachineSize

COLUMNS = ["FAMILY", "TASK", "RUNS", "INTERNET", "MACHINES", "EACH AT MOST", "ALL AT MOST"]
UNKNOWN = "?"


def planned(suite: Suite, found: Sequence[TaskForecast]) -> Result:
    """A table, the sum below it, and the same as data; sums are None where a task is not known yet."""
    # Without an image, neither the tasks nor what the aux VM takes are known.
    unbuilt = sorted({one.family for one in found if one.forecast is None or one.forecast.image is None})
    complete = all(one.forecast for one in found)
    runs = sum(one.runs or 0 for one in found)
    worst = sum((one.runs or 0) * one.forecast.worst_micro_usd for one in found if one.forecast)
    with_retries = worst * (1 + suite.retries)
    builder = max((one.forecast.builder_micro_usd for one in found if one.forecast), default=0) if unbuilt else 0
    data = {
        "suite": suite.name,
        "tasks": [one.model_dump(mode="json") for one in found],
        "runs": runs if complete else None,
        "concurrency": suite.concurrency,
        "worst_usd": worst / MICRO if complete else None,
        "worst_with_retries_usd": with_retries / MICRO if complete else None,
        "builder_usd": builder / MICRO if complete else None,
        "budget_usd": None if suite.budget is None else float(suite.budget),
        "images_to_build": unbuilt,
    }
    said = [
        f"{'' if complete else 'At least '}{runs} {'run' if runs == 1 else 'runs'} on {suite.cloud}, "
        f"{suite.concurrency} at once, each to its limit of {suite.limits.ttl} at the most."
    ]
    if worst:
        said.append(f"{dollars(worst)}; {dollars(with_retries)} if every run needs all its {suite.retries} retries.")
    elif complete:
        said.append("Costs nothing: the machines are your own.")
    if not complete:
        said.append(f"What is not known yet ({UNKNOWN}) is not counted.")
    lines = [table(COLUMNS, [_row(one) for one in found]), "", " ".join(said)]
    if suite.budget is not None:
        lines.append(f"The budget of {suite.budget} USD is never exceeded: what does not fit waits, or is refused.")
    if unbuilt:
        lines.append(
            f"Not built yet: {', '.join(unbuilt)}. Their internet ({UNKNOWN}), their aux VMs, and tasks that no "
            "manifest names are known once `batch run`, or `provisioner image build`, has built their images."
            + (f" Each image costs up to {dollars(builder)} more." if builder else "")
        )
    return Result(data, "\n".join(lines))


def _row(one: TaskForecast) -> list[str]:
    told = one.forecast
    if told is None or one.runs is None:
        return [one.family, one.task or UNKNOWN, *[UNKNOWN] * 5]
    return [
        one.family,
        told.task,
        str(one.runs),
        UNKNOWN if told.full_internet is None else "full" if told.full_internet else "none",
        " + ".join(_machine(size) for size in told.machines.values()),
        dollars(told.worst_micro_usd),
        dollars(one.runs * told.worst_micro_usd),
    ]


def _machine(size: MachineSize) -> str:
    return size.types[0] if size.types else f"{size.cpus} vCPU, {size.memory_gib:g} GiB"
