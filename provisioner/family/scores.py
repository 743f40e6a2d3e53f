"""Classifies scoring results: takes untrusted JSON and returns frozen records. A failure is never a score of 0.

The raw result is the guest helper's object: {"status": "ok", "value": ...}, or {"status": "error", "kind": ...}
with the optional strings `message`, `traceback` and `type` (the exception's type); or None if there was none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from signal import SIGKILL
from typing import Any, Literal

from pydantic import ConfigDict, Field

from provisioner.base.models import Record
from provisioner.base.validation import shown

MAXIMUM_NAME_CHARACTERS = 128
MAXIMUM_MESSAGE_CHARACTERS = 4096
MAXIMUM_DETAILS_CHARACTERS = 64 << 10

Failure = Literal["nan", "infinite", "not_a_number", "exception", "exit", "killed", "timeout", "malformed"]
ScoreKind = Literal["scored", "manual_scoring_required", "not_scored"] | Failure
IntermediateKind = Literal["scored", "invalid_submission", "no_score"] | Failure

NO_FAILURES: tuple[str, ...] = ("scored", "manual_scoring_required", "not_scored")


class ScoreResult(Record):
    """The result of scoring at the end of a run.

    Args:
        kind: `scored`, `manual_scoring_required`, `not_scored` (the family cannot score a run), or the kind of failure.
        score: a finite number if kind is `scored`, else None.
        message: the problem, for the operator; empty if there was none.
        details: the family's traceback, bounded; empty if there was none.
    """

    kind: ScoreKind
    score: float | None = None
    message: str = ""
    details: str = ""

    @property
    def failed(self) -> bool:
        """Whether scoring gave neither a score nor a request for manual scoring."""
        return self.kind not in NO_FAILURES


class IntermediateResult(Record):
    """The result of intermediate scoring.

    Args:
        kind: `scored`, `invalid_submission` (the family returned NaN), `no_score` (None), or the kind of failure.
        score: a finite number, NaN if the submission is invalid, else None.
        message: the family's message to the agent.
        details: the family's details, which the agent never sees.
        failure: the problem, for the operator; empty if there was none.
        traceback: the family's traceback, bounded; empty if there was none.
    """

    # Serialise NaN as NaN: as null, an invalid submission would become no score.
    model_config = ConfigDict(ser_json_inf_nan="constants")

    kind: IntermediateKind
    score: float | None = None
    message: dict[str, Any] = Field(default_factory=dict)
    details: dict[str, Any] = Field(default_factory=dict)
    failure: str = ""
    traceback: str = ""

    @property
    def is_logged(self) -> bool:
        """Whether it belongs in the score log, as scores and invalid submissions do."""
        return self.kind in ("scored", "invalid_submission")

    @property
    def failed(self) -> bool:
        """Whether scoring failed: it gave no score, no invalid submission and no deliberate None."""
        return not self.is_logged and self.kind != "no_score"


def classify_score(result: object) -> ScoreResult:
    """Classifies the result of the family's `score` or `aggregate_scores`. Accepts scores of any range.

    Args:
        result: the guest helper's object, described above.
    """
    try:
        value = _value(result)
        if value is None:
            return ScoreResult(kind="manual_scoring_required")
        score = _number(value, "score")
    except _FailedScoring as failed:
        return ScoreResult(kind=failed.kind, message=failed.message, details=failed.traceback)
    if math.isnan(score):
        return ScoreResult(kind="nan", message="The score is NaN.")
    return ScoreResult(kind="scored", score=score)


def parse_intermediate(result: object) -> IntermediateResult:
    """Classifies the result of the family's `intermediate_score`: {score, message, details}, all optional, or a score.

    Args:
        result: the guest helper's object, described above.
    """
    try:
        value = _value(result)
        parts = value if isinstance(value, dict) else {"score": value}
        if unknown := parts.keys() - {"score", "message", "details"}:
            key = shown(min(unknown, key=str))
            raise _FailedScoring("malformed", f"intermediate_score gave the unknown key {key}.")
        for name in ("message", "details"):
            if not isinstance(parts.get(name), dict | None):
                what = f"intermediate_score gave {_a(parts[name])} as its {name}, not a mapping."
                raise _FailedScoring("malformed", what)
        score = None if parts.get("score") is None else _number(parts["score"], "intermediate score")
    except _FailedScoring as failed:
        return IntermediateResult(kind=failed.kind, failure=failed.message, traceback=failed.traceback)
    kind: IntermediateKind = "no_score" if score is None else "invalid_submission" if math.isnan(score) else "scored"
    message, details = (parts.get(name) or {} for name in ("message", "details"))
    return IntermediateResult(kind=kind, score=score, message=message, details=details)


def visible_message(score: float | None, message: Mapping[str, Any], visible_to_agent: bool) -> dict[str, object]:
    """Returns what the agent may see of an intermediate score: status, message and, unless hidden, the score.

    Args:
        score: the score; NaN is shown as an invalid submission, since JSON has no NaN.
        message: the family's message.
        visible_to_agent: the manifest's scoring.visible_to_agent.
    """
    if score is None:
        return {"status": "no_score", "message": dict(message)}
    if math.isnan(score):
        return {"status": "invalid_submission", "message": dict(message)}
    seen = {"score": score} if visible_to_agent else {}
    return {"status": "scored", **seen, "message": dict(message)}


def was_killed(result: object) -> bool:
    """Returns whether the kernel killed an operation, as when memory is short, by the guest helper's object."""
    return isinstance(result, dict) and result.get("kind") == "exit" and result.get("exit_code") == -SIGKILL


class _FailedScoring(Exception):
    def __init__(self, kind: Failure, message: str, traceback: str = "") -> None:
        super().__init__(message)
        self.kind, self.message, self.traceback = kind, message, traceback


def _value(result: object) -> object:
    """Returns the value of the family's function.

    Raises:
        _FailedScoring: there is none.
    """
    if result is None:
        raise _FailedScoring("killed", "The machine gave no result.")
    if not isinstance(result, dict):
        raise _FailedScoring("malformed", f"The machine answered {_a(result)} instead of a result.")
    status = result.get("status")
    if status == "ok" and "value" in result:
        return result["value"]
    if status == "ok":
        raise _FailedScoring("malformed", "The machine's result contains no value.")
    if status != "error":
        raise _FailedScoring("malformed", f"The machine's result has the unknown status {shown(status)}.")
    raise _error(result)


def _error(result: Mapping[str, object]) -> _FailedScoring:
    kind = result.get("kind")
    failure: Failure
    if kind == "exception":
        name = _text(result.get("type"), MAXIMUM_NAME_CHARACTERS) or "an exception"
        failure, how = "exception", f"raised {name}"
    elif was_killed(result):
        failure, how = "killed", "was killed, as when memory is short"
    elif kind == "exit":
        failure, how = "exit", "ended its process"
    elif kind == "timeout":
        failure, how = "timeout", "did not end in time"
    elif kind in ("invalid", "too_large"):
        failure, how = "malformed", "gave no usable result"
    else:
        return _FailedScoring("malformed", f"The machine's result has the unknown kind of error {shown(kind)}.")
    said = _text(result.get("message"), MAXIMUM_MESSAGE_CHARACTERS) or "no reason was given"
    traceback = _text(result.get("traceback"), MAXIMUM_DETAILS_CHARACTERS)
    return _FailedScoring(failure, f"Scoring {how}: {said}", traceback)


def _number(value: object, what: str) -> float:
    """Converts a JSON number to a float, which may be NaN.

    Raises:
        _FailedScoring: it is none, or infinite.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _FailedScoring("not_a_number", f"The {what} is {_a(value)}, not a number: {shown(value)}.")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if math.isinf(number):
        raise _FailedScoring("infinite", f"The {what} is infinite, or too large for a number.")
    return number


def _text(value: object, limit: int) -> str:
    """Truncates untrusted text and replaces lone surrogates, which cannot be encoded."""
    cut = value[:limit] if isinstance(value, str) else ""
    return cut.encode("utf-8", "replace").decode()


def _a(value: object) -> str:
    names = {bool: "a bool", str: "a string", list: "a list", dict: "a mapping", type(None): "nothing"}
    return names.get(type(value), "a number")
