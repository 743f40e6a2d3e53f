"""Calculates what environments cost, per hour and for a duration, from prices. Pure.

Amounts are whole millionths of a US dollar, rounded up, so that a sum of reservations is never too small.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Annotated

from pydantic import Field

from provisioner.base.models import Record

MICRO = 1_000_000
# EBS bills a GiB-month by the second. An hour costs most in the shortest month, which has this many hours.
HOURS_PER_MONTH = 28 * 24

# AWS gives ten decimal places. Its largest machines cost hundreds of dollars an hour.
Usd = Annotated[Decimal, Field(gt=0, max_digits=14, decimal_places=10)]


class Price(Record):
    """A price and its source.

    Args:
        usd: US dollars for an hour or for a GiB-month; never zero, since an unknown price has no Price.
    """

    usd: Usd
    source: str
    as_of: date


class CostLine(Record):
    """A part of an environment that costs money by the hour.

    Args:
        what: its description, such as "primary: t3.small".
        usd_per_hour: its price in the first place that is tried.
        worst_usd_per_hour: its highest price in any place that may be tried.
    """

    what: str
    usd_per_hour: Decimal
    worst_usd_per_hour: Decimal
    source: str
    as_of: date

    def age_days(self, today: date) -> int:
        """Returns the days since the price was published."""
        return (today - self.as_of).days


class Egress(Record):
    """How much an environment may send, and its price.

    Args:
        gb: gigabytes (10^9 bytes: AWS bills the larger 2^30, so the sum is never too small).
        usd_per_gb: their price.
    """

    gb: Decimal = Decimal(0)
    usd_per_gb: Decimal = Decimal(0)

    @property
    def micro_usd(self) -> int:
        """The price of all of it, in millionths of a US dollar."""
        return micro_usd(self.gb * self.usd_per_gb)


def hourly(lines: Iterable[CostLine]) -> Decimal:
    """Returns the US dollars per hour of all lines in the first place that is tried."""
    return sum((line.usd_per_hour for line in lines), Decimal(0))


def worst_hourly(lines: Iterable[CostLine]) -> Decimal:
    """Returns the highest US dollars per hour of all lines."""
    return sum((line.worst_usd_per_hour for line in lines), Decimal(0))


def micro_usd(usd: Decimal) -> int:
    """Converts US dollars to millionths, rounded up."""
    return math.ceil(usd * MICRO)


def cost(usd_per_hour: Decimal, duration: timedelta) -> int:
    """Returns the cost of a duration in millionths of a US dollar, rounded up, for at least a minute.

    https://aws.amazon.com/ec2/pricing/on-demand: billed by the second, with a minimum of 60 seconds.
    """
    seconds = max(60, math.ceil(duration.total_seconds()))
    return micro_usd(usd_per_hour * seconds / 3600)


def cost_between(usd_per_hour: Decimal, begin: datetime, end: datetime) -> int:
    """Returns the cost between two moments in millionths of a US dollar, rounded up."""
    return cost(usd_per_hour, end - begin)


def dollars(micro: int) -> str:
    """Formats an amount for people, such as `1.2346 USD`, rounded up like the amounts in the ledger."""
    return f"{math.ceil(micro / 100) / 10_000:.4f} USD"
