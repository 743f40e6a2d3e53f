"""Tests how one machine is probed: the program and the questions that it is sent, and what counts as an answer."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import Any

import pytest

from provisioner.base.errors import IsolationError, MachineLostError
from provisioner.clouds.guest_files import SENT
from provisioner.isolation import proof
from provisioner.ssh.exchange import Completed
from tests.unit.fakes.probes import honest_answers, request_in
from tests.unit.isolation.test_probes import asked

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
