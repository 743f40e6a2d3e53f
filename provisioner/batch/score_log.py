"""Bounds a run's score log for its row of results, which passes through the queue. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, AwareDatetime, Field

from provisioner.base import strict_json
from provisioner.base.models import Record, ScoreLogEntry
from provisioner.base.printable import CUT, beginning

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
