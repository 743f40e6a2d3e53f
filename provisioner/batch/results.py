"""The results of runs: one row per run, and their text as JSON Lines and CSV. Pure."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AwareDatetime, Field

from provisioner.base import strict_json
from provisioner.base.models import Phase, Record, ScoreLogEntry
from provisioner.base.printable import CUT, beginning, spreadsheet_cell


@dataclass(frozen=True)
class Mean:
    """A mean and its standard error.

    Args:
        count: how many numbers it is the mean of.
        stderr: None for a single number, and for numbers too large to compute with.
    """

    count: int
    value: float
    stderr: float | None = None

    def __str__(self) -> str:
        return f"{self.value:.2f}" + ("" if self.stderr is None else f" ± {self.stderr:.2f}")


def mean(scores: Sequence[float]) -> Mean | None:
    """Returns the mean of scores, ignoring NaN; None without any."""
    numbers = [score for score in scores if not math.isnan(score)]
    if not numbers:
        return None
    count = len(numbers)
    try:
        value = math.fsum(numbers) / count
        squares = math.fsum((number - value) ** 2 for number in numbers)
    except OverflowError:  # a family may return any finite number
        most = max(map(abs, numbers))
        return Mean(count, math.fsum(number / most for number in numbers) / count * most)
    return Mean(count, value, math.sqrt(squares / (count - 1) / count) if count > 1 else None)


def mean_of_means(groups: Sequence[Sequence[float]]) -> Mean | None:
    """Returns the mean of groups' means, each with the same weight; of a single group, the mean of its scores."""
    means = [found for group in groups if (found := mean(group))]
    return mean([each.value for each in means]) if len(means) > 1 else next(iter(means), None)


MAX_ENTRIES = 500
# Of all entries of a run as JSON. A batch may have ten thousand runs, and its results are read at once.
MAX_BYTES = 64 << 10
# How much of a message or of details is kept, first of each that is long and then of all.
VALUE_CHARACTERS = 2000
SHORT_CHARACTERS = 60
# How deep a row may hold an entry's message.
ROW_DEPTH = 10


class LoggedScore(Record):
    """An intermediate score of a run.

    Args:
        score: None for an invalid submission, since JSON has no NaN.
        elapsed_seconds: since start() had succeeded.
        message: what the family told the agent; details: what it kept from the agent. What is too long, or is not
            strict JSON, becomes the beginning of its text, as the one value of a mapping with the key `[...]`.
    """

    score: float | None = Field(default=None, allow_inf_nan=False)
    elapsed_seconds: float = Field(ge=-1e10, le=1e10)
    scored_at: AwareDatetime
    message: dict[str, Any] = Field(default_factory=dict)
    details: dict[str, Any] = Field(default_factory=dict)


def _checked_size(entries: tuple[LoggedScore, ...]) -> tuple[LoggedScore, ...]:
    if _size(entries) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES} bytes")
    return entries


ScoreLog = Annotated[tuple[LoggedScore, ...], Field(max_length=MAX_ENTRIES), AfterValidator(_checked_size)]


def bounded(log: Sequence[ScoreLogEntry]) -> tuple[LoggedScore, ...]:
    """Returns a score log that fits into a row of results.

    Details are shortened first, then messages too. Of a log that is still too long, every second entry is left out as
    often as it takes; the first and the last stay.
    """
    log = _thinned(log, lambda entries: len(entries) <= MAX_ENTRIES)
    for message, details in ((VALUE_CHARACTERS, VALUE_CHARACTERS), (VALUE_CHARACTERS, SHORT_CHARACTERS)):
        entries = tuple(_logged(entry, message, details) for entry in log)
        if _size(entries) <= MAX_BYTES:
            return entries
    entries = tuple(_logged(entry, SHORT_CHARACTERS, SHORT_CHARACTERS) for entry in log)
    return tuple(_thinned(entries, lambda rest: _size(rest) <= MAX_BYTES))


def _thinned(entries: Sequence[Any], fits: Callable[[Sequence[Any]], bool]) -> Sequence[Any]:
    """Leaves out every second entry, but never the last, until the rest fits."""
    while not fits(entries) and len(entries) > 2:
        entries = [*entries[:-1:2], entries[-1]]
    return entries


def _logged(entry: ScoreLogEntry, message_characters: int, details_characters: int) -> LoggedScore:
    return LoggedScore(
        score=entry.score if entry.score is not None and math.isfinite(entry.score) else None,
        elapsed_seconds=max(-1e10, min(1e10, entry.elapsed_seconds)),
        scored_at=entry.scored_at,
        message=_shortened(entry.message, message_characters),
        details=_shortened(entry.details, details_characters),
    )


def _shortened(value: dict[str, Any], limit_characters: int) -> dict[str, Any]:
    text = json.dumps(value)
    if len(text) <= limit_characters and _is_strict(text):
        return value
    return {CUT.strip(): beginning(text, limit_characters)}


def _is_strict(text: str) -> bool:
    """Whether the queue's reader accepts a value, in a row around it."""
    try:
        strict_json.parse(b"[" * ROW_DEPTH + text.encode() + b"]" * ROW_DEPTH)
    except strict_json.NotStrictJsonError:
        return False
    return True


def _size(entries: Sequence[LoggedScore]) -> int:
    return sum(len(entry.model_dump_json()) for entry in entries)


Outcome = Literal[
    "scored",  # with a number, or without one if the family says that there is none
    "task_failed",  # the family's own code failed
    "agent_failed",  # the agent ended with an error, switched its machine off, or its submission cannot be read
    "timed_out",  # the agent did not end in time
    "infrastructure_failed",  # provisioner's or the cloud's fault, and there are no retries left
    "over_budget",  # it never fit the budget
    "cancelled",
]

# What views call the outcomes, the best first. Each has a colour and a shape in the report's templates.
OUTCOMES = {
    "scored": "scored",
    "task_failed": "the task's own code failed",
    "agent_failed": "the agent failed",
    "timed_out": "the agent ran out of time",
    "infrastructure_failed": "infrastructure failed",
    "over_budget": "over budget",
    "cancelled": "cancelled",
}
# The name of the phase that stands for all attempts but the last.
EARLIER = "earlier attempts"

# Rows pass through the queue, which others may be able to write to: what views compute with and print is bounded. What
# we write is far below that. The other fields are compared with the suite's.
Text = Annotated[str, Field(max_length=16_384)]
ByRole = Annotated[dict[Text, Text], Field(max_length=10)]


class Row(Record):
    """The result of one run.

    Args:
        key: the run's, see suite.Run.
        family_version: as the family's manifest has it; empty if it has none.
        agent_files: the SHA-256 of the agent's files and links, as they were sent; empty for a submission.
        score: None without a number.
        message: why it has this outcome, and what went wrong beside it.
        agent_exit_code: None if a submission stood in for the agent, or if the agent never ended by itself.
        attempts: how many environments were launched for the run.
        retried: why each of them but the last failed.
        environment: id of the last one, under which the archive has its logs.
        machine_types: by role; empty on a cloud without machine types.
        images: by role.
        cost_micro_usd: of all attempts, in millionths of a US dollar.
        score_log: the last attempt's intermediate scores, bounded as `bounded` says.
        score_log_entries: how many intermediate scores there were; None if the score log could not be read.
        phases: those of the last attempt, after one phase for all earlier attempts.
        recording: the hash of the last environment's sealed logs, which `provisioner verify` checks; empty for none.
        warnings: what may spoil the result, such as a task that differs at each call of get_tasks.
        version: of provisioner.
    """

    key: str
    family: str
    task: str
    agent: str
    repetition: int
    outcome: Outcome
    family_version: Text = ""
    agent_files: Text = ""
    score: float | None = None
    message: Text = ""
    agent_exit_code: Annotated[int, Field(ge=-(2**31), le=2**31)] | None = None
    attempts: int = Field(default=1, ge=0, le=1000)
    retried: tuple[Text, ...] = Field(default=(), max_length=1000)
    environment: Text = ""
    cloud: Text = ""
    region: Text = ""
    machine_types: ByRole = Field(default_factory=dict)
    images: ByRole = Field(default_factory=dict)
    cost_micro_usd: int = Field(default=0, ge=0, le=2**53)
    started_at: AwareDatetime | None = None
    ended_at: AwareDatetime | None = None
    phases: tuple[Phase, ...] = Field(default=(), max_length=1000)
    score_log: ScoreLog = ()
    score_log_entries: int | None = Field(default=None, ge=0, le=2**53)
    recording: Text = ""
    warnings: tuple[Text, ...] = Field(default=(), max_length=100)
    version: Text = ""


def by_task_and_agent(rows: Iterable[Row]) -> dict[tuple[str, str], list[Row]]:
    """Groups rows by (family/task, agent), in the order of their first appearance."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((f"{row.family}/{row.task}", row.agent), []).append(row)
    return groups


def as_jsonl(rows: Iterable[Row]) -> str:
    """Returns one JSON object per line. A score that is not a number is written as NaN."""
    return "".join(json.dumps(row.model_dump(mode="json")) + "\n" for row in rows)


def as_csv(rows: Sequence[Row]) -> str:
    """Returns one line per row, below a line of headings. Lists and mappings are JSON in their cells.

    The score log is left out: it would be more than a spreadsheet's cell can hold.

    What a spreadsheet could take for a formula has an apostrophe in front; as_jsonl has the text as it is.
    """
    text = io.StringIO()
    names = [name for name in Row.model_fields if name != "score_log"]
    writer = csv.DictWriter(text, fieldnames=names, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        values = row.model_dump(mode="json", exclude={"score_log"})
        writer.writerow({name: spreadsheet_cell(value) for name, value in values.items()})
    return text.getvalue()
