"""The command `costs`: the reserved and actual costs of launches."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

import typer

from provisioner.base.errors import UsageError
from provisioner.base.printable import spreadsheet_cell
from provisioner.base.validation import shown
from provisioner.cli.output import Result, table
from provisioner.cli.sessions import session, shared_database
from provisioner.clouds.registry import CLOUDS, not_priced
from provisioner.costs.ledger import Entry, Total, totals
from provisioner.costs.prices import MICRO, dollars

MICRO_USD = "_micro_usd"


class Group(StrEnum):
    """The groups that costs can be summed by."""

    environment = "environment"
    batch = "batch"
    family = "family"
    project = "project"
    day = "day"


def main(
    by: Annotated[Group, typer.Option("--by", help="Group to sum by.")] = Group.environment,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values.")] = False,
    cloud: Annotated[str | None, typer.Option("--cloud", help="Only what was launched there.")] = None,
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
