from __future__ import annotations

import json
import math

import pytest

from provisioner.family.scores import (
    IntermediateResult,
    ScoreKind,
    ScoreResult,
    classify_score,
    parse_intermediate,
    visible_message,
)


@pytest.mark.parametrize("value", [0, 1, 0.5, -3, 1e300, 10**20])
def test_a_number_is_a_score_whatever_its_range(value: float) -> None:
    assert classify_score({"status": "ok", "value": value}) == ScoreResult(kind="scored", score=float(value))


def test_none_asks_for_manual_scoring() -> None:
    result = classify_score({"status": "ok", "value": None})
    assert (result.kind, result.score, result.failed) == ("manual_scoring_required", None, False)


def test_a_family_without_scoring_has_not_failed() -> None:
    assert not ScoreResult(kind="not_scored").failed


def test_a_traceback_is_kept_bounded_and_every_result_is_json() -> None:
    result = classify_score(
        {"status": "error", "kind": "exception", "message": "\ud800" * 10_000, "traceback": "t" * 100_000}
    )
    assert len(result.message) < 5000
    assert len(result.details) == 64 << 10
    assert json.loads(result.model_dump_json())["kind"] == "exception"


SCORES: list[tuple[str, object, ScoreKind, str]] = [
    ("true", {"status": "ok", "value": True}, "not_a_number", "a bool, not a number: true"),
    ("text", {"status": "ok", "value": "1.0"}, "not_a_number", "a string, not a number: '1.0'"),
    ("a list", {"status": "ok", "value": [1.0]}, "not_a_number", "a list, not a number: a list of 1"),
    ("a mapping", {"status": "ok", "value": {"score": 1}}, "not_a_number", "a mapping, not a number"),
    ("shell syntax", {"status": "ok", "value": "$(reboot)"}, "not_a_number", "'$(reboot)'"),
    ("a terminal's escape", {"status": "ok", "value": "\x1b[2J"}, "not_a_number", r"'\x1b[2J'"),
    ("NaN", json.loads('{"status": "ok", "value": NaN}'), "nan", "is NaN"),
    ("infinity", json.loads('{"status": "ok", "value": -Infinity}'), "infinite", "is infinite"),
    ("a number that no float holds", {"status": "ok", "value": 10**400}, "infinite", "is infinite"),
    (
        "an exception",
        {"status": "error", "kind": "exception", "type": "KeyError", "message": "x", "traceback": "T"},
        "exception",
        "Scoring raised KeyError: x",
    ),
    (
        "an exit",
        {"status": "error", "kind": "exit", "message": "sys.exit(3)"},
        "exit",
        "ended its process: sys.exit(3)",
    ),
    ("a timeout", {"status": "error", "kind": "timeout"}, "timeout", "did not end in time"),
    ("a result that is too large", {"status": "error", "kind": "too_large"}, "malformed", "gave no usable result"),
    ("an unknown kind", {"status": "error", "kind": "${x}"}, "malformed", "the unknown kind of error '${x}'"),
    ("an unknown status", {"status": "fine", "value": 1}, "malformed", "the unknown status 'fine'"),
    ("no value", {"status": "ok"}, "malformed", "contains no value"),
    ("no result", None, "killed", "gave no result"),
    ("a kill", {"status": "error", "kind": "exit", "exit_code": -9}, "killed", "Scoring was killed"),
    ("garbage", "\0garbage", "malformed", "answered a string"),
    ("100 MB of garbage", "x" * 100_000_000, "malformed", "answered a string"),
    ("a bare number", 1.0, "malformed", "answered a number"),
]


@pytest.mark.parametrize(("name", "result", "kind", "says"), SCORES, ids=[row[0] for row in SCORES])
def test_a_result_that_is_no_score_is_its_own_failure(name: str, result: object, kind: ScoreKind, says: str) -> None:
    score = classify_score(result)
    assert (score.kind, score.score, score.failed) == (kind, None, True)
    assert says in score.message


INTERMEDIATE: list[tuple[object, str, str]] = [
    ("well done", "not_a_number", "a string, not a number"),
    (True, "not_a_number", "a bool, not a number"),
    ({"points": 1}, "malformed", "unknown key 'points'"),
    ({"score": 1, "message": "well done"}, "malformed", "a string as its message"),
    ({"score": 1, "details": [1]}, "malformed", "a list as its details"),
    ({"score": "1"}, "not_a_number", "is a string, not a number"),
    ({"score": False}, "not_a_number", "is a bool, not a number"),
    ({"score": math.inf}, "infinite", "is infinite"),
]


@pytest.mark.parametrize(("value", "kind", "says"), INTERMEDIATE)
def test_an_intermediate_none_is_a_failure_and_not_logged(value: object, kind: str, says: str) -> None:
    result = parse_intermediate({"status": "ok", "value": value})
    assert (result.kind, result.score, result.is_logged, result.failed) == (kind, None, False, True)
    assert says in result.failure


@pytest.mark.parametrize(
    ("text", "kind", "logged"),
    [
        ('{"score": 0.5, "message": {"a": 1}, "details": {"b": [2]}}', "scored", True),
        ('{"score": NaN, "message": {"a": 1}, "details": {"b": [2]}}', "invalid_submission", True),
        ('{"score": null, "message": {"a": 1}, "details": {"b": [2]}}', "no_score", False),
    ],
)
def test_the_kinds_of_intermediate_results(text: str, kind: str, logged: bool) -> None:
    result = parse_intermediate(json.loads(f'{{"status": "ok", "value": {text}}}'))
    assert (result.kind, result.is_logged, result.failed) == (kind, logged, False)
    assert (result.message, result.details) == ({"a": 1}, {"b": [2]})


def test_all_of_an_intermediate_result_is_optional() -> None:
    for value, kind, score in ((1, "scored", 1.0), (0.5, "scored", 0.5), (None, "no_score", None)):
        bare = parse_intermediate({"status": "ok", "value": value})
        assert (bare.kind, bare.score, bare.failed) == (kind, score, False)
    assert parse_intermediate({"status": "ok", "value": {}}) == IntermediateResult(kind="no_score")
    nulls = {"score": 1, "message": None, "details": None}
    assert parse_intermediate({"status": "ok", "value": nulls}) == IntermediateResult(kind="scored", score=1)


def test_intermediate_scorings_exception_keeps_its_traceback() -> None:
    error = {"status": "error", "kind": "exception", "type": "OSError", "message": "gone", "traceback": "at line 1"}
    result = parse_intermediate(error)
    assert (result.kind, result.failure, result.traceback) == ("exception", "Scoring raised OSError: gone", "at line 1")


def test_nan_survives_being_written() -> None:
    written = parse_intermediate({"status": "ok", "value": {"score": math.nan}}).model_dump_json()
    score = IntermediateResult.model_validate_json(written).score
    assert score is not None
    assert math.isnan(score)


@pytest.mark.parametrize(
    ("score", "visible", "expected"),
    [
        (0.5, True, {"status": "scored", "score": 0.5, "message": {"a": 1}}),
        (0.5, False, {"status": "scored", "message": {"a": 1}}),
        (0.0, True, {"status": "scored", "score": 0.0, "message": {"a": 1}}),
        (math.nan, True, {"status": "invalid_submission", "message": {"a": 1}}),
        (None, True, {"status": "no_score", "message": {"a": 1}}),
    ],
)
def test_the_agent_sees_message_and_score_only_where_allowed(
    score: float | None, visible: bool, expected: dict[str, object]
) -> None:
    assert visible_message(score, {"a": 1}, visible) == expected
