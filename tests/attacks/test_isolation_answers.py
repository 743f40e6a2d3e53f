"""A family's install() replaces the exec server in its machines, so that the probes answer whatever it likes.

Whatever a machine answers, an environment never starts unless each machine gave exactly one answer to each question
that it was asked, and nothing that can be seen from outside speaks against it.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

import pytest

from provisioner.base.errors import IsolationError
from provisioner.base.models import Role
from provisioner.session import Session
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.probes import answers, honest_answers
from tests.unit.fakes.world import boot_and_prove, created, environment

Answer = Callable[[dict[str, Any]], bytes]
FORGED = ["root", "anything", "not reached", ""]


def prove(session: Session, cloud: FakeCloud, **liars: Answer) -> None:
    """Proves the isolation of an environment with an aux VM, in which some machines lie."""
    [booting] = created(session, environment(roles=("primary", "aux")))
    for role, answer in liars.items():
        cloud.guest("primary" if role == "primary" else "aux").probes = answer
    boot_and_prove(session, booting)


def changed(change: Callable[[list[list[str]]], list[list[Any]]]) -> Answer:
    """Returns a machine's answer with its rows changed."""

    def answer(request: dict[str, Any]) -> bytes:
        return json.dumps([request["word"], change(answers(request))]).encode()

    return answer


LIES: dict[str, Answer] = {
    "one-line": lambda _: json.dumps([{"user": "root", "probe": "x", "reached": False, "detail": ""}]).encode(),
    "forged": changed(lambda rows: [FORGED]),
    "none": lambda request: json.dumps([request["word"], []]).encode(),
    "missing": changed(lambda rows: rows[1:]),
    "repeated": changed(lambda rows: [*rows, rows[0]]),
    "additional": changed(lambda rows: [*rows, FORGED]),
    "replaced": changed(lambda rows: [FORGED, *rows[1:]]),
    "other-user": changed(lambda rows: [["agent", *row[1:]] for row in rows]),
    "silent": lambda _: b"",
    "wrong-word": lambda request: json.dumps(["guessed", answers(request)]).encode(),
    "not-sent": changed(lambda rows: [[*rows[0][:2], "impossible", "no device"], *rows[1:]]),
    "true": changed(lambda rows: [[*rows[0][:2], False, ""], *rows[1:]]),
}


@pytest.mark.parametrize(("role", "lie"), [("primary", "missing"), *(("aux", lie) for lie in LIES)])
def test_a_machine_that_does_not_answer_what_it_was_asked_fails(
    session: Session,
    cloud: FakeCloud,
    lie: str,
    role: Role,
) -> None:
    with pytest.raises(IsolationError, match=f"The {role} machine") as raised:
        prove(session, cloud, **{role: LIES[lie]})
    assert raised.value.exit_code == 6


def test_honest_machines_pass(session: Session, cloud: FakeCloud) -> None:
    prove(session, cloud)


def test_each_machine_answers_for_itself(
    session: Session,
    cloud: FakeCloud,
) -> None:
    heard: list[bytes] = []

    def overheard(request: dict[str, Any]) -> bytes:
        heard.append(honest_answers(request))
        return heard[0]

    with pytest.raises(IsolationError):
        prove(session, cloud, primary=overheard, aux=overheard)


def test_a_machine_that_hides_a_connection_is_betrayed(
    session: Session,
    cloud: FakeCloud,
) -> None:
    def visit(request: dict[str, Any]) -> bytes:
        [(port, word)] = {
            probe[-2:] and (probe[5], probe[6]) for probe in request["probes"]["root"] if probe[3] == "knock_udp"
        }
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.sendto(word.encode(), ("127.0.0.1", port))
        return honest_answers(request)

    with pytest.raises(IsolationError, match="not isolated") as raised:
        prove(session, cloud, aux=visit)
    assert "aux machine: its word reached the controller's loopback" in (raised.value.details or "")


def test_a_perfect_lie_does_not_outweigh_what_the_cloud_sees(session: Session, cloud: FakeCloud) -> None:
    cloud.faults.differences = ["primary machine: a card leads to the host's network"]
    with pytest.raises(IsolationError, match="not isolated") as raised:
        prove(session, cloud)
    assert "seen from outside: primary machine: a card" in (raised.value.details or "")
