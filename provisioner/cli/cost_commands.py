"""plan and costs: what launches would cost, and what they did cost."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from datetime import timedelta
from enum import StrEnum
from typing import Annotated

import typer

from provisioner.cli.context import (
    EnvFileOption,
    FamilyArgument,
    Launch,
    TaskArgument,
    command,
    family_session,
    session,
    shared_database,
)
from provisioner.cli.output import Result, table
from provisioner.clock import now
from provisioner.clouds.registry import Where
from provisioner.costs.ledger import Entry, Total, totals
from provisioner.costs.prices import MICRO, dollars, hourly
from provisioner.environment.estimate import Forecast, forecast
from provisioner.ttl import BUILDER_LIMIT, words

MICRO_USD = "_micro_usd"


class Group(StrEnum):
    """What costs are summed by."""

    environment = "environment"
    batch = "batch"
    family = "family"
    project = "project"
    day = "day"


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    command(app, "plan")(plan)
    command(app, "costs")(costs)


def plan(
    family: FamilyArgument, task: TaskArgument, env_file: EnvFileOption = None, *, where: Where, launch: Launch
) -> Result:
    """Machines, images, internet, prices, and the worst case."""
    opened, loaded = family_session(family, env_file, where, launch)
    found = forecast(opened, loaded, task)
    data = found.model_dump(mode="json")
    today = now().date()
    for line, priced in zip(data["lines"], found.lines, strict=True):
        line["age_days"] = priced.age_days(today)
    return Result(data, _plan_text(found))


def _plan_text(found: Forecast) -> str:
    today = now().date()
    internet = {True: "full", False: "none", None: "not known until the family's image is built"}[found.full_internet]
    limit = words(timedelta(seconds=found.limit_seconds))
    lines = [
        f"{found.family}, task {found.task}, on {found.cloud}{' in ' + found.region if found.region else ''}",
        f"  internet: {internet}",
        f"  image: {found.image or 'to be built first'}",
    ]
    for role, size in found.machines.items():
        kind = f"{size.types[0]}, " if size.types else ""
        lines.append(f"  {role}: {kind}{size.cpus} vCPU, {size.memory_gib:g} GiB, {size.disk_gib} GiB disk")
    if found.image is None:
        lines.append("  aux VM: not known until the family's image is built")
    if not found.lines:
        return "\n".join([*lines, "", f"Costs nothing: the machines are your own. Limit {limit}."])
    rows = [
        [line.what, f"{line.usd_per_hour:.4f}", f"{line.worst_usd_per_hour:.4f}", line.source,
         f"{line.as_of} ({line.age_days(today)} days)"]
        for line in found.lines
    ]  # fmt: skip
    worst = dollars(found.worst_micro_usd)
    lines += [
        "",
        table(["WHAT", "USD/HOUR", "AT MOST", "PRICE FROM", "OF"], rows),
        "",
        f"Per hour {hourly(found.lines):.4f} USD. At the most {worst}, if it lives to its limit of {limit}.",
    ]
    if found.image is None:
        builder = dollars(found.builder_micro_usd)
        lines.append(f"Each image to be built: at the most {builder} (limit {words(BUILDER_LIMIT)}).")
    lines.append("Not counted: data that leaves AWS, and the storage of images.")
    return "\n".join(lines)


def costs(
    by: Annotated[Group, typer.Option("--by", help="What to sum by.")] = Group.environment,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values.")] = False,
) -> Result:
    """The ledger of this home, and that of the database that PROVISIONER_DATABASE names."""
    entries = session().ledger.entries()
    if database := shared_database():
        entries += session(database=database).ledger.entries()
    sums = totals(entries, by.value)
    held = sum(one.held_micro_usd for one in sums)
    actual = sum(one.actual_micro_usd for one in sums)
    data = {
        "by": by.value,
        "totals": [_usd(one.model_dump(mode="json")) for one in sums],
        "entries": [_usd(one.model_dump(mode="json")) for one in entries],
        "held_usd": held / MICRO,
        "actual_usd": actual / MICRO,
    }
    if as_csv:
        return Result(data, _csv(Entry, entries) if by is Group.environment else _csv(Total, sums))
    rows = [
        [one.group or "-", str(one.launches), dollars(one.held_micro_usd), dollars(one.actual_micro_usd)]
        for one in sums
    ]
    if not rows:
        return Result(data, "Nothing was launched yet.")
    rows.append(["total", str(len(entries)), dollars(held), dollars(actual)])
    return Result(data, table([by.value.upper(), "LAUNCHES", "HELD", "ACTUAL"], rows))


def _usd(row: dict[str, object]) -> dict[str, object]:
    """A row with amounts in US dollars, as people and programs read them."""
    told = {}
    for name, value in row.items():
        amount = isinstance(value, int) and name.endswith(MICRO_USD)
        told[name.replace(MICRO_USD, "_usd")] = value / MICRO if amount and isinstance(value, int) else value
    return told


def _csv(kind: type[Entry | Total], rows: Sequence[Entry | Total]) -> str:
    dumped = [_usd(row.model_dump(mode="json")) for row in rows]
    text = io.StringIO()
    names = [name.replace(MICRO_USD, "_usd") for name in kind.model_fields]
    writer = csv.DictWriter(text, fieldnames=names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(dumped)
    return text.getvalue().rstrip("\n")
