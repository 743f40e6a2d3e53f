"""Lists what each machine is asked to try for the proof of isolation, and judges its answers. Pure.

The controller names every probe: an answer that is missing, repeated or to another question is no answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from provisioner.base.errors import IsolationError
from provisioner.base.models import Environment, ProbeResult, Role
from provisioner.base.validation import shown

User = Literal["root", "agent"]

PUBLIC_TCP = (("1.1.1.1", 443), ("8.8.8.8", 53))
PUBLIC_DNS = ("1.1.1.1", "8.8.8.8")
PUBLIC_IPV6 = "2606:4700:4700::1111"
PUBLIC_NAMES = (("deb.debian.org", 80), ("pypi.org", 443))
# Amazon's page "Instance metadata", ECS task credentials, and the VPC resolver's link-local address.
METADATA = ("169.254.169.254", "169.254.170.2")
RESOLVERS = ("169.254.169.253", "10.0.2.3")
# No machine runs a service there on a bridge of its own (RFC 863).
DISCARD = 9
S3_NAME, S3_ADDRESS = "s3.amazonaws.com", "52.216.0.1"
# Of a probe's detail; guest/sent/probe.py cuts it there.
DETAIL_CHARACTERS = 200
# More answers than this are not even counted: 200 allowlisted destinations, for two users, and the fixed probes.
MOST_ANSWERS = 1000
SHOWN = 12

_Answer = tuple[
    User,
    Annotated[str, Field(max_length=DETAIL_CHARACTERS)],
    Literal["reached", "not reached", "impossible"],
    Annotated[str, Field(max_length=DETAIL_CHARACTERS)],
]
_ANSWERS: TypeAdapter[tuple[str, list[_Answer]]] = TypeAdapter(
    tuple[str, Annotated[list[_Answer], Field(max_length=MOST_ANSWERS)]]
)


@dataclass(frozen=True)
class CanaryPorts:
    """The canary's ports on the controller's loopback."""

    tcp: int
    udp: int


@dataclass(frozen=True)
class Probe:
    """One attempt to reach something.

    Args:
        name: what it tries, for people; unique among the probes of one user of one machine.
        method: a function of guest/sent/probe.py.
        arguments: the function's.
        expected: whether the task's permission promises that it succeeds; otherwise it must fail.
        card: an address; the probe leaves through the card that leads there. None for wherever the routes lead.
    """

    name: str
    method: str
    arguments: tuple[str | int | tuple[str, int], ...]
    expected: bool = False
    card: str | None = None


@dataclass(frozen=True)
class Questions:
    """What one machine is asked.

    Args:
        role: the machine.
        word: its secret word in this proof, by which the canary and the answers name it.
        cards: the addresses that its cards lead to.
        probes: by user, in the order in which they are sent.
    """

    role: Role
    word: str
    cards: tuple[str, ...]
    probes: Mapping[User, tuple[Probe, ...]]

    def request(self) -> dict[str, object]:
        """Returns the request to guest/sent/probe.py."""
        return {
            "word": self.word,
            "cards": self.cards,
            "probes": {
                user: [[probe.name, probe.expected, probe.card, probe.method, *probe.arguments] for probe in probes]
                for user, probes in self.probes.items()
            },
        }


def questions(
    environment: Environment,
    role: Role,
    word: str,
    canary: CanaryPorts,
    gateways: list[str],
    closed: Iterable[str] = (),
    controllers: Iterable[str] = (),
    *,
    is_silent: bool = False,
) -> Questions:
    """Returns what one machine is asked, by what its permission forbids and promises.

    Args:
        word: a secret word that no other machine was given.
        gateways: addresses at which a machine might reach the controller; the first leads to its management card.
        closed: addresses that it must not reach even with the internet.
        controllers: public addresses that it must not call without the internet, though routes lead there.
        is_silent: whether only what is outside would refuse a connection: a refusal then counts as reached.
    """
    others = (environment.endpoints[other] for other in environment.roles if other in environment.endpoints)
    peers = [end.private_address for end in others if end != environment.endpoints[role] and end.private_address]
    # All neighbours are behind one card.
    cards = () if environment.full_internet else (gateways[0], *peers[:1])
    private = [Probe(f"private network {address}", "tcp", (address, DISCARD)) for address in closed]
    # At one of the ports that the network leaves open for answers.
    calls = [Probe(f"controller {address}", "tcp", (address, canary.tcp)) for address in controllers]
    everyones = [*_fixed(environment, peers), *private, *_through(None, environment, word, canary, gateways), *calls]
    roots = [probe for card in cards for probe in _through(card, environment, word, canary, gateways)]
    roots += [
        replace(call, name=f"{call.name} through the card to {card}", card=card) for card in cards for call in calls
    ]
    if is_silent:
        everyones, roots = ([_strict(probe) for probe in probes] for probes in (everyones, roots))
    # An ordinary user may not send ICMP.
    agents = [probe for probe in everyones if probe.method != "ping"]
    by_user: dict[User, list[Probe]] = {"root": everyones + roots}
    if role != "aux":  # which has no agent
        by_user["agent"] = agents
    unique = {user: tuple(dict.fromkeys(probes)) for user, probes in by_user.items()}
    return Questions(role, word, cards, unique)


def _strict(probe: Probe) -> Probe:
    """The same, but a refusal counts as reached."""
    return replace(probe, method="answer") if probe.method == "tcp" and not probe.expected else probe


def _fixed(environment: Environment, peers: Iterable[str]) -> Iterable[Probe]:
    """Yields what is tried through no particular card."""
    online = environment.full_internet
    yield Probe("reach the internet by name", "tcp_by_name", PUBLIC_NAMES, expected=online)
    yield Probe("ipv6", "tcp6", (PUBLIC_IPV6, 443))
    for address in METADATA:
        yield Probe(f"metadata {address}", "metadata", (address,))
    for peer in peers:
        yield Probe(f"neighbour {peer}", "tcp", (peer, 22), expected=True)
    if not online:
        yield Probe("resolve a public name", "resolve", ("example.com",))
        yield Probe("s3 by name", "tcp_by_name", ((S3_NAME, 443),))
    for destination in environment.allowed_destinations:
        if destination.cidr.endswith("/32"):
            target = (destination.cidr.removesuffix("/32"), destination.port)
            yield Probe(f"allowed {target[0]}:{target[1]}", "allowed", target, expected=True)


def _through(
    card: str | None, environment: Environment, word: str, canary: CanaryPorts, gateways: list[str]
) -> Iterable[Probe]:
    """Yields what is tried through each card, and through whichever the routes lead to."""
    via = f" through the card to {card}" if card else ""
    for address in gateways:
        name = f"controller's loopback at {address}"
        yield Probe(f"{name}{via}", "knock", (address, canary.tcp, word), card=card)
        yield Probe(f"{name} by udp{via}", "knock_udp", (address, canary.udp, word), card=card)
    if environment.full_internet:
        return
    for address, port in PUBLIC_TCP:
        yield Probe(f"tcp {address}:{port}{via}", "tcp", (address, port), card=card)
    yield Probe(f"s3 {S3_ADDRESS}{via}", "tcp", (S3_ADDRESS, 443), card=card)
    for address in (*PUBLIC_DNS, *RESOLVERS, *gateways):
        yield Probe(f"dns udp {address}{via}", "udp", (address, 53), card=card)
    for address in (*PUBLIC_DNS[:1], *RESOLVERS):
        yield Probe(f"dns tcp {address}{via}", "dns_tcp", (address,), card=card)
    yield Probe(f"udp 1.1.1.1:443{via}", "udp", ("1.1.1.1", 443), card=card)
    yield Probe(f"ping 1.1.1.1{via}", "ping", ("1.1.1.1",), card=card)
    if card:
        yield Probe(f"metadata {METADATA[0]}{via}", "metadata", METADATA[:1], card=card)


def evaluate(asked: Questions, answer: bytes) -> tuple[ProbeResult, ...]:
    """Compares one machine's answers with what it was asked.

    Args:
        answer: what the machine sent, of bounded size.

    Returns:
        a result for each probe that it was asked, once for each user.

    Raises:
        IsolationError: the answers are not exactly those to the questions, or a probe could not be sent.
    """
    try:
        word, answers = _ANSWERS.validate_json(answer, strict=True)
    except ValidationError as error:
        raise IsolationError(f"The {asked.role} machine gave no valid answer to the isolation probes.") from error
    if word != asked.word:
        raise IsolationError(f"The {asked.role} machine's answers to the isolation probes are not its own.")
    given = Counter((user, name) for user, name, _, _ in answers)
    expected = {(user, probe.name): probe for user, probes in asked.probes.items() for probe in probes}
    problems = [
        *(f"no answer, as {user}: {name}" for user, name in expected if not given[user, name]),
        *(f"nobody asked, as {user}: {shown(name)}" for user, name in given if (user, name) not in expected),
        *(f"{count} answers, as {user}: {shown(name)}" for (user, name), count in given.items() if count > 1),
        *(
            f"could not be sent, as {user}: {shown(name)}: {shown(detail)}"
            for user, name, outcome, detail in answers
            if outcome == "impossible"
        ),
    ]
    if problems:
        raise IsolationError(
            f"The {asked.role} machine did not give one answer to each isolation probe: {len(problems)} problems.",
            details="\n".join(problems[:SHOWN]),
            hint="Nothing of the task was started. A firewall of the family's own makes probes fail, too.",
        )
    return tuple(
        ProbeResult(
            machine=asked.role,
            user=user,
            probe=name,
            reached=outcome == "reached",
            expected=expected[user, name].expected,
            detail=detail,
        )
        for user, name, outcome, detail in answers
    )


def require(results: Iterable[ProbeResult], visitors: Iterable[Role], differences: Iterable[str]) -> None:
    """Requires that the probes, the canary and the view from outside confirm the isolation.

    Args:
        visitors: the machines whose word reached the canary.
        differences: what the cloud found to be different from what the permission calls for.

    Raises:
        IsolationError: one of them does not.
    """
    wrong = [
        *(f"seen from outside: {difference}" for difference in differences),
        *(f"{role} machine: its word reached the controller's loopback" for role in visitors),
        *(
            f"{result.machine} machine, as {result.user}: {result.probe}: "
            f"{'reached' if result.reached else 'not reached'} ({shown(result.detail)})"
            for result in results
            if result.reached != result.expected
        ),
    ]
    if wrong:
        raise IsolationError(
            f"The environment is not isolated as promised: {len(wrong)} differences.",
            details="\n".join(wrong[:SHOWN]),
            hint="The environment was torn down. docs/explanation/isolation.md explains the probes.",
        )
