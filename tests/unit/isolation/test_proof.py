"""Tests that what the isolation proof asked and saw is kept among the logs, whatever came of it."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from provisioner.base.errors import IsolationError, MachineLostError
from provisioner.clouds.guest_files import SENT
from provisioner.isolation import proof
from provisioner.recording.isolation import DETAIL_CHARACTERS, Proof, load
from provisioner.session import Session
from provisioner.ssh.exchange import Completed
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.probes import answers, honest_answers, request_in
from tests.unit.fakes.world import boot_and_prove, created, environment
from tests.unit.isolation.test_questions import asked
from tests.unit.recording.proofs import OPEN, SURFACE

PROGRAM = (SENT / "probe.py").read_text()


@dataclass
class Machine:
    """Stands for a connection; `answer` is given to whatever is run."""

    answer: bytes | Exception | None = None
    ran: list[list[str]] = field(default_factory=list)

    def run(self, argv: list[str], *, program: str, limit_bytes: int, **_: Any) -> Completed:
        self.ran.append(argv)
        if isinstance(self.answer, Exception):
            raise self.answer
        answer = honest_answers(request_in(program)) if self.answer is None else self.answer
        return Completed(0, io.BytesIO(answer).read(limit_bytes), b"")


def test_the_program_is_sent_and_runs_from_no_file() -> None:
    machine: Any = Machine()
    results = proof.probe_machine(machine, asked(), PROGRAM)
    assert machine.ran == [["probe.py"]]
    assert {result.user for result in results} == {"root", "agent"}


@pytest.mark.parametrize(
    "answer",
    [b"", b"killed", b"[" * 100_000, b"x" * (2 << 20), TimeoutError(), MachineLostError("gone")],
    ids=["empty", "text", "deep", "long", "silent", "lost"],
)
def test_no_valid_answer_counts_as_open(answer: bytes | Exception) -> None:
    machine: Any = Machine(answer)
    with pytest.raises(IsolationError, match="primary machine"):
        proof.probe_machine(machine, asked(), PROGRAM)


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


def test_what_the_cloud_sees_of_the_machines_surface_is_kept(session: Session, cloud: FakeCloud) -> None:
    cloud.faults.surface = {"primary": SURFACE}
    assert prove(session, cloud).surface == {"primary": SURFACE}


def test_a_qemu_that_is_not_enclosed_fails_the_proof(session: Session, cloud: FakeCloud) -> None:
    cloud.faults.surface = {"primary": OPEN}
    with pytest.raises(IsolationError) as raised:
        prove(session, cloud)
    assert raised.value.exit_code == 6
    proof = load(session.environments.logs("env"))
    assert (proof.proven, len(proof.differences or ())) == (False, 3)
    assert "seen from outside: primary machine: QEMU does not run under two seccomp filters" in (
        raised.value.details or ""
    )


def test_a_machine_without_a_valid_answer_is_kept(session: Session, cloud: FakeCloud) -> None:
    with pytest.raises(IsolationError):
        prove(session, cloud, lambda _: b"")
    proof = load(session.environments.logs("env"))
    assert proof.answers["aux"]
    assert all(answer.reached is None for answer in proof.answers["aux"])
    assert (proof.canary, proof.differences) == (None, None)
