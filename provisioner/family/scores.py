"""Classifies scoring results: takes untrusted JSON and returns frozen records. A failure is never a score of 0.

The raw result is the guest helper's object: {"status": "ok", "value": ...}, or {"status": "error", "kind": ...}
with the optional strings `message`, `traceback` and `type` (the exception's type); or None if there was none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
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
    outcome = _outcome(result)
    if isinstance(outcome, _Failed):
        return ScoreResult(kind=outcome.kind, message=outcome.message, details=outcome.traceback)
    if outcome.value is None:
        return ScoreResult(kind="manual_scoring_required")
    number = _number(outcome.value)
    if number is None:
        message = f"The score is {_a(outcome.value)}, not a number: {shown(outcome.value)}."
        return ScoreResult(kind="not_a_number", message=message)
    if math.isnan(number):
        return ScoreResult(kind="nan", message="The score is NaN.")
    if math.isinf(number):
        return ScoreResult(kind="infinite", message="The score is infinite, or too large for a number.")
    return ScoreResult(kind="scored", score=number)


def parse_intermediate(result: object) -> IntermediateResult:
    """Classifies the result of the family's `intermediate_score`: {score, message, details}, all optional, or a score.

    Args:
        result: the guest helper's object, described above.
    """
    outcome = _outcome(result)
    judged = outcome if isinstance(outcome, _Failed) else _intermediate(outcome.value)
    if isinstance(judged, _Failed):
        return IntermediateResult(kind=judged.kind, failure=judged.message, traceback=judged.traceback)
    return judged


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


@dataclass(frozen=True)
class _Returned:
    value: object


@dataclass(frozen=True)
class _Failed:
    kind: Failure
    message: str
    traceback: str = ""


def _outcome(result: object) -> _Returned | _Failed:
    """Returns the value of the family's function, or how it failed."""
    if result is None:
        return _Failed("killed", "The machine gave no result.")
    if not isinstance(result, dict):
        return _Failed("malformed", f"The machine answered {_a(result)} instead of a result.")
    status = result.get("status")
    if status == "ok" and "value" in result:
        return _Returned(result["value"])
    if status == "ok":
        return _Failed("malformed", "The machine's result contains no value.")
    if status != "error":
        return _Failed("malformed", f"The machine's result has the unknown status {shown(status)}.")
    return _error(result)


def _intermediate(value: object) -> IntermediateResult | _Failed:
    if not isinstance(value, dict):
        return _intermediate_score(value, {}, {})
    if unknown := value.keys() - {"score", "message", "details"}:
        return _Failed("malformed", f"intermediate_score gave the unknown key {shown(min(unknown, key=str))}.")
    for name in ("message", "details"):
        if not isinstance(value.get(name), dict | None):
            return _Failed("malformed", f"intermediate_score gave {_a(value[name])} as its {name}, not a mapping.")
    return _intermediate_score(value.get("score"), value.get("message") or {}, value.get("details") or {})


def _intermediate_score(
    value: object, message: dict[str, Any], details: dict[str, Any]
) -> IntermediateResult | _Failed:
    if value is None:
        return IntermediateResult(kind="no_score", message=message, details=details)
    number = _number(value)
    if number is None:
        return _Failed("not_a_number", f"The intermediate score is {_a(value)}, not a number: {shown(value)}.")
    if math.isinf(number):
        return _Failed("infinite", "The intermediate score is infinite, or too large for a number.")
    kind: IntermediateKind = "invalid_submission" if math.isnan(number) else "scored"
    return IntermediateResult(kind=kind, score=number, message=message, details=details)


def _error(result: Mapping[str, object]) -> _Failed:
    kind = result.get("kind")
    said = _text(result.get("message"), MAXIMUM_MESSAGE_CHARACTERS) or "no reason was given"
    traceback = _text(result.get("traceback"), MAXIMUM_DETAILS_CHARACTERS)
    if kind == "exception":
        name = _text(result.get("type"), MAXIMUM_NAME_CHARACTERS) or "an exception"
        return _Failed("exception", f"Scoring raised {name}: {said}", traceback)
    if was_killed(result):
        return _Failed("killed", f"Scoring was killed, as when memory is short: {said}", traceback)
    if kind == "exit":
        return _Failed("exit", f"Scoring ended its process: {said}", traceback)
    if kind == "timeout":
        return _Failed("timeout", f"Scoring did not end in time: {said}", traceback)
    if kind in ("invalid", "too_large"):
        return _Failed("malformed", f"Scoring gave no usable result: {said}", traceback)
    return _Failed("malformed", f"The machine's result has the unknown kind of error {shown(kind)}.")


def _number(value: object) -> float | None:
    """Converts a JSON number to a float. Returns None for anything else, bool included."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _text(value: object, limit: int) -> str:
    """Truncates untrusted text and replaces lone surrogates, which cannot be encoded."""
    cut = value[:limit] if isinstance(value, str) else ""
    return cut.encode("utf-8", "replace").decode()


def _a(value: object) -> str:
    names = {bool: "a bool", str: "a string", list: "a list", dict: "a mapping", type(None): "nothing"}
    return names.get(type(value), "a number")
