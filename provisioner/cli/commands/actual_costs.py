"""What `costs --actual` shows: the ledger beside the cloud's bill."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from decimal import Decimal

from provisioner.cli.output import Result, table
from provisioner.clock import now
from provisioner.clouds.cloud import Cloud
from provisioner.costs.bill import Bill, Comparison, compare, period
from provisioner.costs.ledger import Entry

COLUMNS = ["ENVIRONMENT", "LEDGER", "BILL", "DIFFERENCE", ""]


def actual_costs(cloud: Cloud, entries: Sequence[Entry]) -> Result:
    """Asks for the bill of the days on which the ledger has launches, and compares.

    Args:
        entries: the ledger's launches on this cloud.

    Raises:
        UnavailableError: the cloud sends no bill.
        HostError, InfrastructureError: it does not tell.
    """
    today = now().date()
    days = period(entries, today)
    if days is None:
        return Result({"comparisons": []}, f"Nothing has been launched on {cloud.name} yet.")
    bill = cloud.bill(*days)
    rows = compare(entries, bill.usd_by_environment, days[0], today)
    known = [row for row in rows if row.state == "known"]
    data = {
        "begin": days[0].isoformat(),
        "end": days[1].isoformat(),
        "comparisons": [_as_json(row) for row in rows],
        "ledger_usd": float(sum((row.ledger_usd or Decimal(0) for row in known), Decimal(0))),
        "bill_usd": float(sum((row.bill_usd or Decimal(0) for row in known), Decimal(0))),
        "without_environment_usd": float(bill.untagged_usd),
        "estimated": bill.estimated,
        "requests": bill.requests,
    }
    return Result(data, "\n".join(_lines(rows, known, bill, days)))


def _lines(rows: Sequence[Comparison], known: Sequence[Comparison], bill: Bill, days: tuple[date, date]) -> list[str]:
    ledger = sum((row.ledger_usd or Decimal(0) for row in known), Decimal(0))
    billed = sum((row.bill_usd or Decimal(0) for row in known), Decimal(0))
    cells = [
        [row.environment, _usd(row.ledger_usd), _usd(row.bill_usd), _usd(row.difference_usd), _note(row)]
        for row in rows
    ]
    total = ["total of what is known", _usd(ledger), _usd(billed), _usd(billed - ledger), ""]
    lines = [table(COLUMNS, [*cells, total]), ""]
    if not bill.usd_by_environment:
        lines.append(
            "The bill names no environment: the tag provisioner:environment is not activated as a cost allocation tag "
            "(AWS console, Billing and Cost Management), or was activated after these days."
        )
    lines.append(
        f"The bill from {days[0]} on{', which AWS may still correct' if bill.estimated else ''}. Besides, "
        f"{_usd(bill.untagged_usd)} of it has no environment's tag: public IPv4 addresses, images, and other things in "
        "the account."
    )
    lines.append(f"Cost Explorer was asked {bill.requests} times, for which AWS bills 0.01 USD each.")
    return lines


def _note(row: Comparison) -> str:
    return "" if row.state == "known" else row.state


def _usd(amount: Decimal | None) -> str:
    return "-" if amount is None else f"{amount:.4f} USD"


def _as_json(row: Comparison) -> dict[str, object]:
    def number(amount: Decimal | None) -> float | None:
        return None if amount is None else float(amount)

    return {
        "environment": row.environment,
        "ledger_usd": number(row.ledger_usd),
        "bill_usd": number(row.bill_usd),
        "difference_usd": number(row.difference_usd),
        "state": row.state,
    }
