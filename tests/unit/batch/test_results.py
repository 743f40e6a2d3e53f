"""What runs say together: groups and files."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from inspect_ai.scorer import MetricProtocol, SampleScore, Score, stderr
from pydantic import TypeAdapter, ValidationError

from provisioner.base import strict_json
from provisioner.base.models import ScoreLogEntry
from provisioner.batch.results import (
    MAX_BYTES,
    MAX_ENTRIES,
    Row,
    ScoreLog,
    as_csv,
    as_jsonl,
    bounded,
    by_task_and_agent,
    mean,
    mean_of_means,
)
from tests.unit.batch.report.samples import row


def test_rows_are_grouped_and_written_whole() -> None:
    rows = [row(), row(2, score=None), row(task="hard", score=math.nan)]
    assert {group: len(members) for group, members in by_task_and_agent(rows).items()} == {
        ("guess/easy", "solver"): 2, ("guess/hard", "solver"): 1,
    }  # fmt: skip
    lines = as_jsonl(rows).splitlines()
    assert [json.loads(line)["key"] for line in lines] == [result.key for result in rows]
    assert math.isnan(json.loads(lines[2])["score"])
    read = list(csv.DictReader(io.StringIO(as_csv(rows))))
    assert [line["repetition"] for line in read] == ["1", "2", "1"]
    assert json.loads(read[0]["machine_types"]) == {}
    assert "score_log" not in read[0]


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=50))
def test_the_standard_error_is_inspects(scores: list[float]) -> None:
    found = mean(scores)
    assert found is not None
    assert found.value == pytest.approx(math.fsum(scores) / len(scores), abs=1e-9)
    inspects = cast(MetricProtocol, stderr())([SampleScore(score=Score(value=score)) for score in scores])
    assert found.stderr == pytest.approx(inspects, rel=1e-6, abs=1e-6)


def test_a_single_score_has_no_standard_error_and_nan_is_none() -> None:
    assert str(mean([0.5, math.nan])) == "0.50"
    assert mean([math.nan]) is None
    assert mean([]) is None


def test_each_group_has_the_same_weight() -> None:
    assert str(mean_of_means([[1.0] * 9, [0.0]])) == "0.50 ± 0.50"
    assert mean_of_means([[0.0, 1.0], []]) == mean([0.0, 1.0])
    assert mean_of_means([[]]) is None


@example([sys.float_info.max] * 3)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1))
def test_no_finite_scores_are_too_large(scores: list[float]) -> None:
    found = mean(scores)
    assert found is not None
    assert math.isfinite(found.value)


AT = datetime(2026, 1, 2, tzinfo=UTC)


def entry(number: int = 0, **changes: Any) -> ScoreLogEntry:
    values = {"score": 0.5, "message": {"n": number}, "details": {}, "scored_at": AT, "elapsed_seconds": number}
    return ScoreLogEntry.model_validate({**values, **changes})


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


def test_a_log_that_fits_is_kept_whole() -> None:
    log = bounded([entry(1, details={"hidden": [1, None, "x"]}), entry(2, score=math.nan), entry(3, score=None)])
    assert [logged.score for logged in log] == [0.5, None, None]
    assert (log[0].message, log[0].details) == ({"n": 1}, {"hidden": [1, None, "x"]})
    assert json.loads(as_jsonl([row(score_log=log)]))["score_log"][2]["elapsed_seconds"] == 3


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
    through_the_queue = strict_json.parse(json.dumps(row(score_log=log).model_dump(mode="json")).encode())
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
