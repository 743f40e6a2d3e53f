"""Tests that what the isolation proof asked and saw is kept among the logs, whatever came of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from provisioner.base.errors import IsolationError
from provisioner.recording.isolation import DETAIL_CHARACTERS, Proof, load
from provisioner.session import Session
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.probes import answers
from tests.unit.fakes.world import boot_and_prove, created, environment


def prove(session: Session, cloud: FakeCloud, aux: Callable[[dict[str, Any]], bytes] | None = None) -> Proof:
    """Proves the isolation of an environment with an aux VM, and returns what was kept of it."""
    [booting] = created(session, environment(roles=("primary", "aux")))
    if aux:
        cloud.guest("aux").probes = aux
    boot_and_prove(session, booting)
    return load(session.environments.logs(booting.id))


def test_each_question_and_answer_is_kept_without_secrets(session: Session, cloud: FakeCloud) -> None:
    def chatty(request: dict[str, Any]) -> bytes:
        rows = [[*row[:3], "s3cret-value\x1b[2J" + "x" * 180] for row in answers(request)]
        return json.dumps([request["word"], rows[::-1]]).encode()

    proof = prove(session, cloud, chatty)
    assert (proof.environment, proof.proven, proof.canary, proof.differences) == ("env", True, (), ())
    assert proof.began_at <= proof.ended_at
    assert list(proof.answers) == ["primary", "aux"]
    assert {answer.user for answer in proof.answers["primary"]} == {"root", "agent"}
    [first, *_] = proof.answers["aux"]
    assert (first.user, first.probe, first.expected, first.reached) == (
        "root",
        "reach the internet by name",
        False,
        False,
    )
    assert first.detail.startswith("[redacted:TOKEN]xxx")
    assert len(first.detail) == DETAIL_CHARACTERS


def test_what_was_seen_of_a_machine_that_is_not_isolated_is_kept(session: Session, cloud: FakeCloud) -> None:
    cloud.faults.differences = ["primary machine: a card leads to the host's network"]
    with pytest.raises(IsolationError):
        prove(session, cloud)
    proof = load(session.environments.logs("env"))
    assert (proof.proven, proof.canary) == (False, ())
    assert proof.differences == ("primary machine: a card leads to the host's network",)
    assert "not isolated as promised" in proof.problem


def test_a_machine_without_a_valid_answer_is_kept(session: Session, cloud: FakeCloud) -> None:
    with pytest.raises(IsolationError):
        prove(session, cloud, lambda _: b"")
    proof = load(session.environments.logs("env"))
    assert proof.answers["aux"]
    assert all(answer.reached is None for answer in proof.answers["aux"])
    assert (proof.canary, proof.differences) == (None, None)
