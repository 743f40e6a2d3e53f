"""What runs came to: one row per run, and what they say together. Pure but for writing files."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Literal

from pydantic import Field

from provisioner.models import Phase, Record

Outcome = Literal[
    "scored",  # a number, or the family says that there is none
    "task_failed",  # the family's own code
    "agent_failed",  # the agent ended with an error, switched its machine off, or left what cannot be read
    "timed_out",  # the agent did not end in time
    "infrastructure_failed",  # ours or the cloud's, and the retries are used up
    "over_budget",  # it never fitted
    "cancelled",
]

# The phase that stands for all attempts before the last.
EARLIER = "earlier attempts"
# Two-sided 95 %: the normal distribution's quantile.
Z = 1.959963984540054


class Row(Record):
    """The result of one run.

    Args:
        key: the run's, see suite.Run.
        score: None without a number.
        agent_exit_code: None where a submission was given, or the agent never ran.
        attempts: environments that were launched for it.
        retried: why each of them but the last came to nothing.
        environment: the last one's id; its logs lie in the archive under it.
        machine_types: by role; empty where a cloud sells none.
        images: by role.
        cost_micro_usd: of all attempts, in millionths of a US dollar.
        phases: of the last attempt; before them, as one, the time of those before.
        version: of provisioner.
    """

    key: str
    family: str
    task: str
    agent: str
    repetition: int
    outcome: Outcome
    score: float | None = None
    message: str = ""
    agent_exit_code: int | None = None
    attempts: int = 1
    retried: tuple[str, ...] = ()
    environment: str = ""
    cloud: str = ""
    region: str = ""
    machine_types: dict[str, str] = Field(default_factory=dict)
    images: dict[str, str] = Field(default_factory=dict)
    cost_micro_usd: int = 0
    started_at: datetime | None = None
    ended_at: datetime | None = None
    phases: tuple[Phase, ...] = ()
    version: str = ""


class Estimate(Record):
    """A mean with its 95 % confidence interval.

    Args:
        low, high: None where there are fewer than two scores that are not 0 or 1, or where they are astronomical.
    """

    count: int
    mean: float
    low: float | None
    high: float | None


def estimate(scores: Sequence[float]) -> Estimate | None:
    """The mean of scores; None without any.

    Scores that are all 0 or 1 get Wilson's interval (Wilson 1927), others one from the standard error of the mean.
    """
    known = [score for score in scores if not math.isnan(score)]
    if not known:
        return None
    count = len(known)
    try:
        mean = math.fsum(known) / count
    except OverflowError:  # a family may give any finite number
        mean = math.fsum(score / count for score in known)
    if set(known) <= {0.0, 1.0}:
        low, high = wilson(mean, count)
        return Estimate(count=count, mean=mean, low=low, high=high)
    if count < 2:
        return Estimate(count=count, mean=mean, low=None, high=None)
    try:
        deviation = math.sqrt(math.fsum((score - mean) ** 2 for score in known) / (count - 1))
    except OverflowError:
        return Estimate(count=count, mean=mean, low=None, high=None)
    margin = Z * deviation / math.sqrt(count)
    return Estimate(count=count, mean=mean, low=mean - margin, high=mean + margin)


def wilson(share: float, count: int) -> tuple[float, float]:
    """Wilson's score interval of a share of `count` trials."""
    middle = share + Z * Z / (2 * count)
    margin = Z * math.sqrt(share * (1 - share) / count + Z * Z / (4 * count * count))
    whole = 1 + Z * Z / count
    return max(0.0, (middle - margin) / whole), min(1.0, (middle + margin) / whole)


def by_task_and_agent(rows: Iterable[Row]) -> dict[tuple[str, str], list[Row]]:
    """Rows by (family/task, agent), in the order of their first appearance."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((f"{row.family}/{row.task}", row.agent), []).append(row)
    return groups


def as_jsonl(rows: Iterable[Row]) -> str:
    """One JSON object per line; what is no number stays one, as NaN."""
    return "".join(json.dumps(row.model_dump(mode="json")) + "\n" for row in rows)


def as_csv(rows: Sequence[Row]) -> str:
    """One line per row; what has parts is JSON in its cell."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(Row.model_fields), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        dumped = row.model_dump(mode="json")
        writer.writerow(
            {name: json.dumps(value) if isinstance(value, dict | list) else value for name, value in dumped.items()}
        )
    return text.getvalue()
