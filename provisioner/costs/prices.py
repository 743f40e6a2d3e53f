"""What machines cost: price lists, and the cost of an environment per hour and to its limit. Pure.

Money is counted in whole millionths of a US dollar. What is held is rounded up: a sum of holds is never too small.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Annotated

from pydantic import Field

from provisioner.models import Record

MICRO = 1_000_000
# EBS bills a GiB-month by the second; this many hours are in the shortest month, in which an hour is dearest.
HOURS_PER_MONTH = 28 * 24

Usd = Annotated[Decimal, Field(gt=0, max_digits=12, decimal_places=10)]


class Price(Record):
    """A price and where it is from.

    Args:
        usd: US dollars, for an hour or for a GiB-month; never zero: an unknown price has no Price.
    """

    usd: Usd
    source: str
    as_of: date


class CostLine(Record):
    """One thing of an environment that costs money by the hour.

    Args:
        what: as in "primary: t3.small".
        usd_per_hour: what it costs where it is tried first.
        worst_usd_per_hour: the most that it may cost, wherever it ends up.
    """

    what: str
    usd_per_hour: Decimal
    worst_usd_per_hour: Decimal
    source: str
    as_of: date

    def age_days(self, today: date) -> int:
        """Days since the price was told."""
        return (today - self.as_of).days


def hourly(lines: Iterable[CostLine]) -> Decimal:
    """US dollars per hour of all lines, where they are tried first."""
    return sum((line.usd_per_hour for line in lines), Decimal(0))


def worst_hourly(lines: Iterable[CostLine]) -> Decimal:
    """US dollars per hour of all lines at the most."""
    return sum((line.worst_usd_per_hour for line in lines), Decimal(0))


def micro_usd(usd: Decimal) -> int:
    """Millionths of a US dollar, rounded up."""
    return math.ceil(usd * MICRO)


def cost(usd_per_hour: Decimal, duration: timedelta) -> int:
    """Millionths of a US dollar for a time, rounded up; a machine is billed for a minute at least.

    https://aws.amazon.com/ec2/pricing/on-demand: by the second, with a minimum of 60 seconds.
    """
    seconds = max(60, math.ceil(duration.total_seconds()))
    return micro_usd(usd_per_hour * seconds / 3600)


def cost_between(usd_per_hour: Decimal, begin: datetime, end: datetime) -> int:
    """Millionths of a US dollar from one moment to another, rounded up."""
    return cost(usd_per_hour, end - begin)


def dollars(micro: int) -> str:
    """An amount for people, as `1.2346 USD`; rounded up, like all that is held."""
    return f"{math.ceil(micro / 100) / 10_000:.4f} USD"
