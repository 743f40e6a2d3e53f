"""A run's score log in its row: whole if it fits, and always one that the queue's reader accepts."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from provisioner.base import strict_json
from provisioner.base.models import ScoreLogEntry
from provisioner.batch.results import Row, as_jsonl
from provisioner.batch.score_log import MAX_BYTES, MAX_ENTRIES, LoggedScore, ScoreLog, bounded

AT = datetime(2026, 1, 2, tzinfo=UTC)


def entry(number: int = 0, **changes: Any) -> ScoreLogEntry:
    values = {"score": 0.5, "message": {"n": number}, "details": {}, "scored_at": AT, "elapsed_seconds": number}
    return ScoreLogEntry.model_validate({**values, **changes})


def row(log: tuple[LoggedScore, ...]) -> Row:
    return Row(
        key="f/t/a/1", family="f", task="t", agent="a", repetition=1, outcome="scored", score=1.0, score_log=log
    )  # fmt: skip


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


def test_a_log_that_fits_is_kept_whole() -> None:
    log = bounded([entry(1, details={"hidden": [1, None, "x"]}), entry(2, score=math.nan), entry(3, score=None)])
    assert [logged.score for logged in log] == [0.5, None, None]
    assert (log[0].message, log[0].details) == ({"n": 1}, {"hidden": [1, None, "x"]})
    assert json.loads(as_jsonl([row(log)]))["score_log"][2]["elapsed_seconds"] == 3


@pytest.mark.parametrize(
    "change",
    [
        {"message": nested(97)},
        {"message": {"x": math.nan}},
        {"details": {"x": [math.inf]}},
        {"score": math.nan},
        {"score": math.inf},
        {"message": {"x": "y" * 100_000}, "details": {"x": ["z"] * 50_000}},
        {"elapsed_seconds": 1e300},
    ],
    ids=["deep", "nan", "infinity", "invalid", "infinite", "large", "late"],
)
def test_any_logged_row_comes_back_from_the_queue(change: dict[str, Any]) -> None:
    log = bounded([entry(1, **change), entry(2)])
    through_the_queue = strict_json.parse(json.dumps(row(log).model_dump(mode="json")).encode())
    assert Row.model_validate(through_the_queue).score_log == log
    assert log[1].message == {"n": 2}


def test_a_long_log_is_thinned_and_keeps_its_ends() -> None:
    log = bounded([entry(number) for number in range(1802)])
    assert len(log) <= MAX_ENTRIES
    assert (log[0].elapsed_seconds, log[-1].elapsed_seconds) == (0, 1801)
    gaps = {later.elapsed_seconds - sooner.elapsed_seconds for sooner, later in pairwise(log[:-1])}
    assert gaps == {4.0}


def test_details_are_shortened_before_messages() -> None:
    log = bounded([entry(number, message={"m": "x" * 200}, details={"d": "y" * 1500}) for number in range(100)])
    assert log[0].message == {"m": "x" * 200}
    assert log[0].details["[...]"].startswith('{"d": "yyy')
    assert len(log) == 100


def test_a_forged_log_is_refused() -> None:
    check = TypeAdapter(ScoreLog).validate_python
    values = {"elapsed_seconds": 1, "scored_at": AT}
    assert len(check([values])) == 1
    for forged in (
        [values] * (MAX_ENTRIES + 1),
        [values | {"message": {"x": "y" * MAX_BYTES}}],
        [values | {"score": math.nan}],
        [values | {"scored_at": "2026-01-02T00:00:00"}],
        [values | {"elapsed_seconds": 1e11}],
    ):
        with pytest.raises(ValidationError):
            check(forged)
