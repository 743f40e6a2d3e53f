"""Looks at a machine's network from outside, where root in the machine can change nothing, and compares.

QEMU's own arguments and its monitor say which cards there are and where they lead; its network has no way out; the
egress proxy's arguments and counters say what it lets through. What cannot be seen counts as a difference.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from provisioner.base.models import Environment, Role
from provisioner.clouds.local.network import captures, egress
from provisioner.clouds.local.network.egress import Counts
from provisioner.clouds.local.vm import confinement, qemu

# In QEMU's network: the management card ends there, and no other leads away.
INTERFACES = [confinement.CARD, "lo"]
# A card's line in the monitor's `info network`, and its backend's below it.
# A port of a hub is followed by what it leads to.
CARD = re.compile(r"(?: \\ )?(?:\S+: )?(\S+): index=\d+,type=(\w+)(.*)")
HUB = "hub 0"
# Of what the monitor says, in a difference: so many lines or names, and the beginning of each.
SHOWN_LINES, SHOWN_NAMES, SHOWN_CHARACTERS = 10, 6, 120


@dataclass(frozen=True)
class View:
    """One machine's network, as its host sees it.

    Args:
        arguments: of the running QEMU.
        interfaces: in the network of the running QEMU; empty if that is this process's own.
        cards: the monitor's `info network`.
        proxy: the arguments of the running egress proxy; None if there is none.
        counts: the proxy's; None if there is none.
        opened: the private networks that the machine should reach.
    """

    arguments: tuple[str, ...]
    interfaces: tuple[str, ...]
    cards: str
    proxy: tuple[str, ...] | None
    counts: Counts | None
    opened: tuple[str, ...] = ()


def differences(directory: Path, environment: Environment, role: Role, opened: tuple[str, ...] = ()) -> list[str]:
    """Compares a machine's network with what the permission calls for. Called after its probes have run.

    Args:
        directory: the machine's.
        opened: the private networks that the settings open now.
    """
    try:
        view = replace(_look(directory), opened=opened)
    except (OSError, ValueError, qemu.QMPError) as error:
        return [f"{role} machine: its network cannot be seen from outside: {error}"]
    return [f"{role} machine: {difference}" for difference in compare(view, environment, role)]


def _look(directory: Path) -> View:
    """Looks at a running machine; raises what kept it from seeing something."""
    pid = qemu.live_pid(directory / qemu.PIDFILE)
    if pid is None:
        raise ValueError("QEMU does not run")
    with qemu.QMP(directory) as qmp:
        cards = qmp.monitor("info network")
    counters = directory / egress.COUNTERS
    proxy = egress.pid_of(directory)
    return View(
        arguments=_arguments(pid),
        interfaces=_interfaces(pid),
        cards=cards,
        proxy=None if proxy is None else _arguments(proxy),
        counts=egress.read(counters) if counters.exists() else None,
    )


def _arguments(pid: int) -> tuple[str, ...]:
    return tuple(os.fsdecode(word) for word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1])


def _interfaces(pid: int) -> tuple[str, ...]:
    if Path(f"/proc/{pid}/ns/net").readlink() == Path("/proc/self/ns/net").readlink():
        return ()
    lines = Path(f"/proc/{pid}/net/dev").read_text().splitlines()[2:]
    return tuple(line.partition(":")[0].strip() for line in lines)


def compare(view: View, environment: Environment, role: Role) -> list[str]:
    """Returns a line for each difference. Pure."""
    allowed = {f"{destination.cidr}:{destination.port}" for destination in environment.allowed_destinations}
    link = qemu.link_sockets(role, [peer for peer in environment.roles if peer != role])
    backends = {"management": "tap", **dict.fromkeys(qemu.link_names(link), "dgram")}
    internet = environment.full_internet or bool(allowed)
    is_expected = _pairs(view.arguments) == _pairs(qemu.network(link, 0, 0 if internet else None))
    return [
        *([] if is_expected else ["QEMU runs with other network arguments than it should"]),
        *([] if sorted(view.interfaces) == INTERFACES else ["QEMU does not run in its own network namespace"]),
        *_wrong_cards(view.cards, backends, internet, is_hub=len(link) > 1),
        *_wrong_proxy(view, allowed, environment.full_internet),
    ]


def _pairs(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """Returns QEMU's network arguments; the number of an inherited descriptor is left out."""
    pairs = pairwise(arguments)
    network = [(flag, value) for flag, value in pairs if flag in ("-netdev", "-nic", "-net", "-device")]
    return sorted(
        (flag, re.sub(r"(addr\.str|,fd)=\d+$", r"\1=0", value))
        for flag, value in network
        if flag != "-device" or "net" in value
    )


def _wrong_cards(text: str, expected: dict[str, str], internet: bool, *, is_hub: bool) -> list[str]:
    said = [line for line in text.replace("\r", "").splitlines() if line.strip() and not captures.is_own(line)]
    lines = [line for line in said if not (is_hub and line == HUB)]
    matches = {line: CARD.fullmatch(line) for line in lines}
    backends = {match[1]: match for match in matches.values() if match and match[2] != "nic"}
    kinds = expected | ({"internet": "stream"} if internet else {})
    odd = [line[:SHOWN_CHARACTERS] for line, match in matches.items() if not match]
    problems = [f"QEMU's monitor says: {line!r}" for line in odd[:SHOWN_LINES]]
    if {name: match[2] for name, match in backends.items()} != kinds:
        names = [name[:SHOWN_CHARACTERS] for name in sorted(backends)[:SHOWN_NAMES]]
        problems.append(f"its cards lead to {names}, not to {sorted(kinds)}")
    return problems


def _wrong_proxy(view: View, allowed: set[str], full_internet: bool) -> list[str]:
    if not full_internet and not allowed:
        return [] if view.proxy is None and view.counts is None else ["it has an egress proxy"]
    if view.proxy is None or view.counts is None:
        return ["its egress proxy does not run, or does not report its counters"]
    flags = list(pairwise(view.proxy))
    problems = []
    if {value for flag, value in flags if flag == "--allow"} != allowed:
        problems.append("its egress proxy was given another allowlist")
    if [value for flag, value in flags if flag == "--private"] != (list(view.opened) if full_internet else []):
        problems.append("its egress proxy was given other private networks")
    if ("--full-internet" in view.proxy) != full_internet:
        problems.append("its egress proxy was given another permission")
    if view.counts.outside:
        problems.append(f"{view.counts.outside} connections went to addresses outside the allowlist")
    # The probes of the metadata services always send some: if none was dropped, something else carried them.
    if full_internet and not view.counts.denied:
        problems.append("its egress proxy dropped none of the packets that the probes had to send")
    return problems
