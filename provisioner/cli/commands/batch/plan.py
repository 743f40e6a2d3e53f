"""The command `batch plan`: what a suite would run, and what it costs in the worst case."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from provisioner.base.models import MachineSize
from provisioner.batch.context import TaskForecast
from provisioner.batch.suite import Suite, load_suite
from provisioner.cli.commands.batch.lookup import batch_context
from provisioner.cli.options import parse_path
from provisioner.cli.output import Result, names_in_line, table
from provisioner.clouds.cloud import Scarcity
from provisioner.costs.prices import MICRO, dollars

SuiteArgument = Annotated[Path, typer.Argument(metavar="SUITE", help="The suite file (YAML).", parser=parse_path)]
COLUMNS = ["FAMILY", "TASK", "RUNS", "INTERNET", "MACHINES"]
COSTS = ["EACH AT MOST", "ALL AT MOST"]
UNKNOWN = "?"


def main(suite: SuiteArgument) -> Result:
    """Describes what a suite would run, and its worst case."""
    loaded = load_suite(suite)
    context = batch_context(loaded, suite.absolute(), "plan")
    tasks = context.forecasts()
    return plan_result(loaded, tasks, context.capacity(tasks), context.session.cloud.scarcity)


def plan_result(
    suite: Suite, tasks: Sequence[TaskForecast], capacity: int | None = None, scarcity: Scarcity | None = None
) -> Result:
    """Returns a table of tasks with a summary, and the same as data. Sums are None if a task is not known yet.

    Args:
        capacity: for how many environments there is room at once; None if that is not known.
        scarcity: what limits `capacity`, such as memory or a quota; None if that is not known.
    """
    # Until its image is built, a family's tasks may be unknown, and so may their aux VMs.
    unbuilt = sorted({task.family for task in tasks if task.forecast is None or task.forecast.image is None})
    complete = all(task.forecast for task in tasks)
    sized = all(task.forecast and task.forecast.has_aux_vm is not None for task in tasks)
    runs = sum(task.runs or 0 for task in tasks)
    usual = sum((task.runs or 0) * task.forecast.usual_micro_usd for task in tasks if task.forecast)
    worst = sum((task.runs or 0) * task.forecast.worst_micro_usd for task in tasks if task.forecast)
    with_retries = worst * (1 + suite.retries)
    at_once = min(suite.concurrency, runs) if complete else suite.concurrency
    machines = [task.forecast.machines.values() for task in tasks if task.forecast]
    memory_gib = at_once * max((sum(size.memory_gib for size in sizes) for sizes in machines), default=0.0)
    builder = max((task.forecast.builder_micro_usd for task in tasks if task.forecast), default=0) if unbuilt else 0
    data = {
        "suite": suite.name,
        "tasks": [task.model_dump(mode="json") for task in tasks],
        "runs": runs if complete else None,
        "concurrency": suite.concurrency,
        "environments_at_once": at_once,
        "capacity": capacity,
        "memory_gib_at_once": memory_gib if complete else None,
        "usual_usd": usual / MICRO if complete else None,
        "worst_usd": worst / MICRO if complete else None,
        "worst_with_retries_usd": with_retries / MICRO if complete else None,
        "builder_usd": builder / MICRO if complete else None,
        "budget_usd": None if suite.budget is None else float(suite.budget),
        "images_to_build": unbuilt,
    }
    columns = COLUMNS + (COSTS if suite.is_billed else [])
    rows = [_row(task)[: len(columns)] for task in tasks]
    lines = [table(columns, rows), "", " ".join(_summary(suite, runs, worst, complete, sized))]
    lines.append(_room(at_once, memory_gib, complete and not unbuilt))
    if worst and runs:
        lines.append(
            f"1,000 runs of this mix: about {dollars(1000 * usual // runs)}, as earlier runs cost, or at the usual "
            f"price until the ttl for tasks without any; at most {dollars(1000 * worst // runs)}."
        )
    if scarcity and capacity is not None and capacity < at_once:
        lines.append(too_many(at_once, capacity, scarcity))
    if suite.budget is not None:
        lines.append(
            f"The budget of {suite.budget} USD holds, but for late traffic: runs that do not fit wait or are refused."
        )
    needed: dict[str, dict[str, None]] = {}
    for task in tasks:
        needed.setdefault(task.family, {}).update(dict.fromkeys(task.forecast.needs if task.forecast else ()))
    lines += [
        f"{family} needs {names_in_line(names)}: `env_file` has to set them."
        for family, names in needed.items()
        if names
    ]
    if unbuilt:
        lines.append(
            f"Not built yet: {', '.join(unbuilt)}. Their internet access ({UNKNOWN}), and tasks and aux VMs "
            "that their text does not tell, are known once `batch run` or `image build` has built the images."
            + (f" Each image costs up to {dollars(builder)} more." if builder else "")
        )
    return Result(data, "\n".join(lines))


def too_many(count: int, capacity: int, scarcity: Scarcity) -> str:
    """Says that fewer environments than a suite asks for exist at once."""
    return (
        f"{scarcity.room} for {capacity} of {count} environments now, so `batch run`"
        f"{' without --database' * scarcity.each_controller} runs at most {max(1, capacity)} at once. {scarcity.remedy}"
    )


def within(suite: Suite, capacity: int | None) -> Suite:
    """Returns a suite that has no more environments at once than there is room for, and at least one."""
    if capacity is None or capacity >= suite.concurrency:
        return suite
    return suite.model_copy(update={"concurrency": max(1, capacity)})


def _summary(suite: Suite, runs: int, worst: int, complete: bool, sized: bool) -> list[str]:
    """Returns sentences about all runs; those that are known cost at most `worst`, in millionths of a US dollar."""
    sentences = [
        f"{'' if complete else 'At least '}{runs} {'run' if runs == 1 else 'runs'} on {suite.cloud}, "
        f"{suite.concurrency} at once, each for at most its ttl of {suite.limits.ttl}."
    ]
    if worst:
        with_retries = dollars(worst * (1 + suite.retries))
        least = "" if sized else "At least "
        sentences.append(
            f"{least}{dollars(worst)}; {with_retries} if every run needs all of its {suite.retries} retries."
        )
        if not sized:
            sentences.append("Aux VMs of families that are not built yet are not counted.")
    elif complete:
        sentences.append("Costs nothing: the machines are your own.")
    if not complete:
        sentences.append(f"What is not known yet ({UNKNOWN}) is not counted.")
    return sentences


def _room(at_once: int, memory_gib: float, complete: bool) -> str:
    """Returns a sentence about the environments that exist at once."""
    environments = "1 environment exists" if at_once == 1 else f"{at_once} environments exist"
    memory = f", with {'at least ' if not complete else ''}{memory_gib:g} GiB of memory" if memory_gib else ""
    return f"At most {environments} at once{memory}."


def _row(task: TaskForecast) -> list[str]:
    """Returns a row of the table."""
    forecast = task.forecast
    if forecast is None or task.runs is None:
        return [task.family, task.task or UNKNOWN, *[UNKNOWN] * 5]
    return [
        task.family,
        forecast.task,
        str(task.runs),
        UNKNOWN if forecast.full_internet is None else "full" if forecast.full_internet else "none",
        " + ".join(_machine(size) for size in forecast.machines.values()),
        dollars(forecast.worst_micro_usd),
        dollars(task.runs * forecast.worst_micro_usd),
    ]


def _machine(size: MachineSize) -> str:
    return size.types[0] if size.types else f"{size.cpus} vCPU, {size.memory_gib:g} GiB"
