"""Tests what machines are asked and how their answers are judged. tests/local tests the probes themselves."""

from __future__ import annotations

import json
from typing import Any

import pytest

from provisioner.base.errors import IsolationError
from provisioner.base.models import Destination, Endpoint, ProbeResult, Role
from provisioner.isolation.questions import CanaryPorts, Questions, evaluate, questions, require
from tests.unit.fakes.probes import answers, honest_answers
from tests.unit.fakes.world import environment

ALLOWED = (Destination(cidr="203.0.113.7/32", port=443), Destination(cidr="192.0.2.0/24", port=80))
NEVER = ["metadata 169.254.169.254", "metadata 169.254.170.2", "ipv6", "controller's loopback at 10.0.2.2",
         "controller's loopback at 10.0.2.3 by udp"]  # fmt: skip
OFFLINE = ["tcp 1.1.1.1:443", "dns udp 8.8.8.8", "dns tcp 169.254.169.253 through the card to 10.0.2.2", "s3 by name",
           "resolve a public name", "udp 1.1.1.1:443 through the card to 10.213.0.3",
           "ping 1.1.1.1"]  # fmt: skip


def asked(role: Role = "primary", **changes: Any) -> Questions:
    """Returns what a machine of an environment with an aux VM is asked."""
    addresses: dict[Role, str] = {"primary": "10.213.0.2", "aux": "10.213.0.3"}
    endpoints = {r: Endpoint(host="127.0.0.1", port=1, private_address=a) for r, a in addresses.items()}
    running = environment(roles=("primary", "aux"), **{"full_internet": False, **changes}, endpoints=endpoints)
    return questions(running, role, "word", CanaryPorts(1234, 4321), ["10.0.2.2", "10.0.2.3"])


def results(questions: Questions, reached: tuple[str, ...] = (), missed: tuple[str, ...] = ()) -> list[ProbeResult]:
    """Returns the judged answers of a machine, of which some differ from what is promised."""
    given = answers(questions.request())
    for answer in given:
        answer[2] = "reached" if answer[1] in reached else "not reached" if answer[1] in missed else answer[2]
    return list(evaluate(questions, json.dumps(["word", given]).encode()))


@pytest.mark.parametrize("online", [False, True], ids=["offline", "online"])
def test_every_user_is_asked_what_is_never_allowed(online: bool) -> None:
    users_by_role: dict[Role, list[str]] = {"primary": ["root", "agent"], "aux": ["root"]}
    for role, users in users_by_role.items():
        by_user = asked(role, full_internet=online).probes
        assert list(by_user) == users
        for probes in by_user.values():
            expected = {probe.name: probe.expected for probe in probes}
            assert len(expected) == len(probes), "a name is used twice"
            assert {expected[name] for name in NEVER} == {False}
            assert expected["reach the internet by name"] == online
            assert expected[f"neighbour 10.213.0.{3 if role == 'primary' else 2}"]
            assert ("s3 by name" in expected) != online


def test_each_machine_must_reach_every_other() -> None:
    addresses = {"primary": "10.213.0.2", "db": "10.213.0.3", "web": "10.213.0.4"}
    endpoints = {role: Endpoint(host="h", port=1, private_address=address) for role, address in addresses.items()}
    running = environment(roles=tuple(addresses), endpoints=endpoints)
    for role, address in addresses.items():
        questions_of_one = questions(running, role, "word", CanaryPorts(1, 2), ["10.0.2.2"])
        names = {probe.name for probe in questions_of_one.probes["agent"] if probe.expected}
        assert names == {f"neighbour {other}" for other in addresses.values() if other != address}


def test_offline_root_asks_each_card_and_the_agent_no_ping() -> None:
    offline = asked(allowed_destinations=ALLOWED)
    assert offline.cards == ("10.0.2.2", "10.213.0.3")
    root = {probe.name: probe.expected for probe in offline.probes["root"]}
    assert {root[name] for name in OFFLINE} == {False}
    assert root["allowed 203.0.113.7:443"]
    assert not any("192.0.2.0" in name for name in root)
    agent = {probe.name for probe in offline.probes["agent"]}
    assert agent == {name for name in root if "through the card" not in name and "ping" not in name}


def test_controllers_are_called_and_a_refusal_counts_where_only_they_would_refuse() -> None:
    running = environment(roles=("primary",), full_internet=False, endpoints={"primary": Endpoint(host="h", port=1)})
    for is_silent, method in ((False, "tcp"), (True, "answer")):
        given = questions(
            running, "primary", "word", CanaryPorts(1234, 4321), ["10.0.2.2"], (), ["192.0.2.1"], is_silent=is_silent
        )
        root = {probe.name: probe for probe in given.probes["root"]}
        for name in ("controller 192.0.2.1", "controller 192.0.2.1 through the card to 10.0.2.2"):
            assert (root[name].method, root[name].arguments) == (method, ("192.0.2.1", 1234))
            assert not root[name].expected
        assert root["tcp 1.1.1.1:443"].method == root["s3 52.216.0.1 through the card to 10.0.2.2"].method == method
        assert root["metadata 169.254.169.254"].method == "metadata"
        assert "controller 192.0.2.1" in {probe.name for probe in given.probes["agent"]}


@pytest.mark.parametrize("name", [*NEVER, *OFFLINE])
def test_reaching_more_than_promised_names_the_probe(name: str) -> None:
    offline = asked()
    require(results(offline), [], [])
    with pytest.raises(IsolationError, match="not isolated as promised") as raised:
        require(results(offline, reached=(name,)), [], [])
    assert f"primary machine, as root: {name}: reached ('said by a fake')" in (raised.value.details or "")
    assert raised.value.exit_code == 6


@pytest.mark.parametrize("name", ["neighbour 10.213.0.3", "reach the internet by name"])
def test_reaching_less_than_promised_is_an_error_too(name: str) -> None:
    with pytest.raises(IsolationError) as raised:
        require(results(asked(full_internet=True), missed=(name,)), [], [])
    assert f"as agent: {name}: not reached" in (raised.value.details or "")


def test_the_canary_and_the_outside_view_outweigh_answers() -> None:
    with pytest.raises(IsolationError) as raised:
        require(results(asked()), ["aux"], ["the group has a rule too many"])
    assert (raised.value.details or "").splitlines() == [
        "seen from outside: the group has a rule too many",
        "aux machine: its word reached the controller's loopback",
    ]


@pytest.mark.parametrize("detail", ["\x1b]52;c;cGF5bG9hZA==\a", "[Errno 19] No such device"], ids=["escape", "device"])
def test_a_probe_that_could_not_be_sent_is_a_printable_error(detail: str) -> None:
    questions = asked()
    given = answers(questions.request())
    given[0][2:] = ["impossible", detail]
    with pytest.raises(IsolationError, match="one answer to each") as raised:
        evaluate(questions, json.dumps(["word", given]).encode())
    assert "could not be sent, as root" in (raised.value.details or "")
    assert "\x1b" not in (raised.value.details or "")


def test_honest_answers_are_results_of_their_machine() -> None:
    questions = asked("aux")
    judged = evaluate(questions, honest_answers(questions.request()))
    assert {(result.machine, result.user) for result in judged} == {("aux", "root")}
    assert all(result.reached == result.expected for result in judged)
    assert len(judged) == len(questions.probes["root"])
