"""Tests what a record says came of its environment, and which logs are those of what failed."""

from __future__ import annotations

from typing import Any

import pytest

from provisioner.clock import now
from provisioner.environment.verdicts import described, failed_parts
from provisioner.models import Breakdown, Outcome, ScoreLogEntry
from tests.unit.fakes.world import environment


def outcome(status: str, **more: Any) -> Outcome:
    return Outcome(status=status, scored_at=now(), **more)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({}, ()),
        ({"outcome": outcome("scored", score=0.0), "agent_exit_code": 0}, ()),
        ({"outcome": outcome("manual_scoring_required")}, ()),
        ({"outcome": outcome("exception"), "agent_exit_code": 1}, ("score", "aggregate_scores", "intermediate_score")),
        ({"outcome": outcome("scored", score=1.0), "agent_exit_code": 3}, ("agent",)),
        ({"breakdown": Breakdown(phase="start", message="x", at=now())}, ("start", "settle_home")),
        ({"breakdown": Breakdown(message="x", at=now()), "agent_exit_code": 3}, ()),
        ({"breakdown": Breakdown(phase="unknown", message="x", at=now())}, ()),
        ({"breakdown": Breakdown(phase="build step", message="x", at=now())}, ("shell",)),
    ],
    ids=["nothing yet", "all well", "by hand", "scoring", "agent", "start", "no phase", "unknown phase", "build"],
)
def test_the_failed_part_is_known_from_the_record(changes: dict[str, Any], parts: tuple[str, ...]) -> None:
    assert failed_parts(environment().model_copy(update=changes)) == parts


def test_agent_scores_and_why_it_ended_are_told() -> None:
    entries = tuple(
        ScoreLogEntry(score=score, message={"a": 1}, details={"b": "ä"}, scored_at=now(), elapsed_seconds=61.5)
        for score in (0.25, None)
    )
    told = described(
        environment().model_copy(
            update={
                "score_log": entries,
                "agent_ended_at": now(),
                "agent_exit_code": 4,
                "outcome": outcome("exception", message="score() raised ValueError", details="line 1\nline 2"),
                "breakdown": Breakdown(phase="score", message="The machine was lost.", at=now()),
            }
        )
    )
    text = "\n".join(told)
    assert told[0] == 'scored after 62 s: 0.25, message {"a": 1}, details {"b": "ä"}'
    assert told[1].startswith("scored after 62 s: no score")
    assert "UTC, exit code 4" in text
    assert "outcome: exception, no score" in text
    assert "\n  score() raised ValueError\n  line 1\n  line 2\n" in text
    assert told[-1].startswith("failed in the phase score at ")
    assert told[-1].endswith(": The machine was lost.")


def test_a_long_score_log_is_shown_by_its_end() -> None:
    entry = ScoreLogEntry(score=1.0, scored_at=now(), elapsed_seconds=1)
    told = described(environment(score_log=[entry.model_dump()] * 50))
    assert told[0] == "50 intermediate scores, of which the last 20:"
    assert len(told) == 21
