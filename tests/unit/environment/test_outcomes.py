"""Tests what is said of how an environment ended, and to whom the loss of a machine is attributed."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from provisioner.base.clock import now
from provisioner.base.errors import AgentError, MachineLostError
from provisioner.base.models import Breakdown, Outcome, Role, ScoreLogEntry
from provisioner.clouds.cloud import TerminationReason
from provisioner.environment.outcomes import (
    Loss,
    attribute_loss,
    attributing_loss,
    described,
    failed_parts,
    find_cause,
    primary_runs,
)
from provisioner.session import Session
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.world import environment, up


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


OFF = TerminationReason("QEMU says guest-shutdown", from_within=True)
SPOT = TerminationReason("Server.SpotInstanceTermination")
SILENT = TerminationReason()
CRASH = TerminationReason("QEMU crashed or was killed", from_within=None)


@pytest.mark.parametrize(
    ("primary", "aux", "began", "expired", "cause"),
    [
        pytest.param(None, None, True, False, "agent", id="unreachable"),
        pytest.param(None, None, False, False, "unknown", id="unreachable before"),
        pytest.param(OFF, None, True, False, "agent", id="off"),
        pytest.param(None, OFF, True, False, "agent", id="aux off"),
        pytest.param(OFF, None, False, False, "unknown", id="off before"),
        pytest.param(SPOT, None, True, False, "cloud", id="spot"),
        pytest.param(None, SPOT, True, False, "cloud", id="aux spot"),
        pytest.param(SPOT, OFF, True, False, "agent", id="both"),
        pytest.param(SILENT, None, True, False, "unknown", id="silent"),
        pytest.param(CRASH, None, True, False, "unknown", id="crash"),
        pytest.param(CRASH, SPOT, True, False, "cloud", id="crash and spot"),
        pytest.param(CRASH, OFF, True, False, "agent", id="crash and off"),
        pytest.param(SPOT, None, True, True, "ttl", id="ttl"),
    ],
)
def test_only_what_the_cloud_says_excuses_an_agent(
    primary: TerminationReason | None, aux: TerminationReason | None, began: bool, expired: bool, cause: str
) -> None:
    machines: dict[Role, TerminationReason | None] = {"primary": primary, "aux": aux}
    assert attribute_loss(machines, agent_began=began, expired=expired).cause == cause


def test_a_host_that_the_cloud_calls_impaired_is_no_agents_doing(session: Session, cloud: FakeCloud) -> None:
    env = session.environments.update(up(session), agent_at=now())
    cloud.impairments = {"primary": "the host is impaired"}
    loss = find_cause(session, env, agent_began=True)
    assert loss == Loss("cloud", "primary machine (the host is impaired)")


def test_an_unreachable_cloud_blames_no_agent(session: Session, cloud: FakeCloud) -> None:
    env = session.environments.update(up(session), agent_at=now())
    cloud.faults.unreachable = True
    assert find_cause(session, env, agent_began=True).cause == "unknown"


def test_the_blame_is_told_by_the_error(session: Session, cloud: FakeCloud) -> None:
    env = up(session)
    with pytest.raises(MachineLostError, match="No answer"), attributing_loss(session, env):
        raise MachineLostError("No answer.")
    session.environments.update(env, agent_at=now())
    with pytest.raises(AgentError, match="Nothing more can be scored") as caught, attributing_loss(session, env):
        raise MachineLostError("No answer.")
    assert caught.value.exit_code == 7
    cloud.end_machine(env)
    cloud.ending = SPOT
    with pytest.raises(MachineLostError, match="The cloud confirms the loss") as lost, attributing_loss(session, env):
        raise MachineLostError("No answer.")
    assert SPOT.message in lost.value.cloud_words


def test_an_extended_machine_has_not_reached_its_limit(session: Session, cloud: FakeCloud) -> None:
    env = session.environments.update(up(session), agent_at=now(), expires_at=now())
    session.environments.update(env, expires_at=now() + timedelta(hours=1))
    with pytest.raises(AgentError, match="the cloud says that it runs"), attributing_loss(session, env):
        raise MachineLostError("No answer.")
    cloud.faults.unreachable = True
    assert primary_runs(session, env) is None
