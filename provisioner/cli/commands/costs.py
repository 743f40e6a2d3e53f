"""The commands `plan` and `costs`: estimated, reserved and actual costs of launches."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from datetime import timedelta
from enum import StrEnum
from typing import Annotated

import typer

from provisioner.base.clock import BUILDER_TTL, format_duration, now
from provisioner.base.errors import UsageError
from provisioner.base.printable import spreadsheet_cell
from provisioner.base.validation import shown
from provisioner.cli.command import command
from provisioner.cli.family_sessions import destinations, family_session
from provisioner.cli.options import AllowOption, EnvFileOption, FamilyArgument, Launch, TaskArgument
from provisioner.cli.output import Result, names_in_line, table
from provisioner.cli.sessions import session, shared_database
from provisioner.clouds.registry import CLOUDS, Where, not_priced
from provisioner.costs.ledger import Entry, Total, totals
from provisioner.costs.prices import MICRO, dollars, hourly
from provisioner.environment.planning import Forecast, forecast
from provisioner.family.check import refuse_mistakes

MICRO_USD = "_micro_usd"


class Group(StrEnum):
    """The groups that costs can be summed by."""

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
    family: FamilyArgument,
    task: TaskArgument,
    env_file: EnvFileOption = None,
    allow: AllowOption = None,
    *,
    where: Where,
    launch: Launch,
) -> Result:
    """Shows machines, image, internet access, prices and the worst-case cost."""
    opened, loaded = family_session(family, env_file, where, launch)
    checked = refuse_mistakes(loaded, task, opened.variables if env_file else None)
    allowed = destinations(allow)
    allowlist = opened.cloud.check_allowlist(allowed)
    estimate = forecast(opened, loaded, task, checked, allowlist=bool(allowed))
    data = {**estimate.model_dump(mode="json"), "allowlist": allowlist}
    today = now().date()
    for line, priced in zip(data["lines"], estimate.lines, strict=True):
        line["age_days"] = priced.age_days(today)
    return Result(data, _plan_text(estimate, allowlist))


# Of a family whose image is not built yet: whether a task has an aux VM, as far as that is known.
_AUX_VM = {
    False: "none in the module; certain once the image is built",
    None: "not known until the family's image is built",
}


def _plan_text(estimate: Forecast, allowlist: str) -> str:
    today = now().date()
    internet = {True: "full", False: "none", None: "not known until the family's image is built"}[
        estimate.full_internet
    ]
    ttl = format_duration(timedelta(seconds=estimate.limit_seconds))
    lines = [
        f"{estimate.family}, task {estimate.task}, on {estimate.cloud}"
        f"{' in ' + estimate.region if estimate.region else ''}",
        f"  internet: {internet}",
        f"  base image: {estimate.base_image}",
        f"  image: {estimate.image or estimate.outlook}",
    ]
    for role, size in estimate.machines.items():
        kind = f"{size.types[0]}, " if size.types else ""
        lines.append(f"  {role}: {kind}{size.cpus} vCPU, {size.memory_gib:g} GiB, {size.disk_gib} GiB disk")
    if estimate.room:
        lines.append(f"  room: {estimate.room}")
    if allowlist:
        lines.append(f"  allowlist: {allowlist}")
    if not estimate.image:
        lines.append(f"  aux VM: {_AUX_VM[estimate.has_aux_vm]}")
    if estimate.needs:
        lines.append(f"  variables: {names_in_line(estimate.needs)} not set; set them in the file of --env-file")
    if not estimate.lines:
        return "\n".join([*lines, "", f"Costs nothing: the machines are your own. Time to live {ttl}."])
    rows = [
        [line.what, f"{line.usd_per_hour:.4f}", f"{line.worst_usd_per_hour:.4f}", line.source,
         f"{line.as_of} ({line.age_days(today)} days)"]
        for line in estimate.lines
    ]  # fmt: skip
    worst = dollars(estimate.worst_micro_usd)
    lines += [
        "",
        table(["PART", "USD/HOUR", "AT MOST", "PRICE FROM", "DATE"], rows),
        "",
        f"Per hour {hourly(estimate.lines):.4f} USD. At most {worst}, if it lives for its whole time to live of {ttl}.",
    ]
    if estimate.image is None:
        builder = dollars(estimate.builder_micro_usd)
        lines.append(f"Each image to be built: at most {builder} (time to live {format_duration(BUILDER_TTL)}).")
    if estimate.not_included:
        lines.append(f"Not included: {estimate.not_included}.")
    return "\n".join(lines)


def costs(
    by: Annotated[Group, typer.Option("--by", help="Group to sum by.")] = Group.environment,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values.")] = False,
    cloud: Annotated[
        str | None, typer.Option("--cloud", help="Only what was launched there.", show_default=False)
    ] = None,
    as_json: bool = False,
) -> Result:
    """Shows the ledgers of this home and of the database that PROVISIONER_DATABASE names."""
    if cloud is not None and cloud not in CLOUDS:
        raise UsageError(f"There is no cloud {shown(cloud)}.", hint=f"The clouds are {' and '.join(CLOUDS)}.")
    if as_csv and as_json:
        raise UsageError("--csv and --json are two forms of one table: give one.")
    entries = session().ledger.entries()
    if database := shared_database():
        entries += session(database=database).ledger.entries()
    entries = [entry for entry in entries if cloud in (None, entry.cloud)]
    sums = totals(entries, by.value)
    reserved = sum(total.reserved_micro_usd for total in sums)
    actual = sum(total.actual_micro_usd for total in sums)
    clouds = sorted({entry.cloud for entry in entries})
    left_out = {name: what for name in clouds if (what := not_priced(name))}
    data = {
        "by": by.value,
        "totals": [_usd(total.model_dump(mode="json")) for total in sums],
        "entries": [_usd(entry.model_dump(mode="json")) for entry in entries],
        "reserved_usd": reserved / MICRO,
        "actual_usd": actual / MICRO,
        "not_included": left_out,
    }
    if as_csv:
        return Result(data, _csv(Entry, entries) if by is Group.environment else _csv(Total, sums))
    rows = [
        [total.group or "-", str(total.launches), dollars(total.reserved_micro_usd), dollars(total.actual_micro_usd)]
        for total in sums
    ]
    if not rows:
        return Result(data, "Nothing has been launched yet.")
    rows.append(["total", str(len(entries)), dollars(reserved), dollars(actual)])
    text = table([by.value.upper(), "LAUNCHES", "RESERVED", "ACTUAL"], rows)
    return Result(data, "\n\n".join([text, *(f"Not included on {name}: {what}." for name, what in left_out.items())]))


def _usd(row: dict[str, object]) -> dict[str, object]:
    """Converts a row's amounts from millionths to US dollars."""
    converted = {}
    for name, value in row.items():
        amount = isinstance(value, int) and name.endswith(MICRO_USD)
        converted[name.replace(MICRO_USD, "_usd")] = value / MICRO if amount and isinstance(value, int) else value
    return converted


def _csv(kind: type[Entry | Total], rows: Sequence[Entry | Total]) -> str:
    dumped = [_usd(row.model_dump(mode="json")) for row in rows]
    text = io.StringIO()
    names = [name.replace(MICRO_USD, "_usd") for name in kind.model_fields]
    writer = csv.DictWriter(text, fieldnames=names, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: spreadsheet_cell(value) for name, value in row.items()} for row in dumped)
    return text.getvalue().rstrip("\n")
