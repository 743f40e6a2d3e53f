"""Isolation, proven by packets: runs the guest's probe program and judges what it saw. Fails closed."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

from pydantic import TypeAdapter, ValidationError

from provisioner.errors import IsolationError, MachineLostError
from provisioner.models import Destination, Environment, ProbeResult, Record, Role
from provisioner.remote.ssh import Connection

PROGRAM = "/usr/lib/provisioner/guest/probe.py"
PROBE_SECONDS = 60
ANSWER_LIMIT_BYTES = 1 << 20

# Without a permission everything is forbidden but these; the whole list is in guest/probe.py.
PROMISED_ALWAYS = ("neighbour ", "allowed ")
# With full_internet only these are judged: each is promised, or forbidden all the same.
PROMISED_ONLINE = ("reach the internet by name",)
FORBIDDEN_ONLINE = ("controller's loopback ", "metadata ", "ipv6")


class _Seen(Record):
    user: str
    probe: str
    reached: bool
    detail: str


class Canary:
    """A listener on the controller's loopback that no machine may reach. Notes who did."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.visited = False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                visitor, _ = self._listener.accept()
                self.visited = True
                visitor.close()

    def close(self) -> None:
        """Stops listening."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@contextlib.contextmanager
def canary() -> Iterator[Canary]:
    """A canary for as long as the probes run."""
    made = Canary()
    try:
        yield made
    finally:
        made.close()


def request(environment: Environment, role: Role, canary_port: int, gateways: list[str]) -> dict[str, Any]:
    """What the probe program is asked to try in one machine. Pure.

    Args:
        canary_port: a listener on the controller's loopback.
        gateways: addresses under which a machine might find the controller.
    """
    other: Role = "aux" if role == "primary" else "primary"
    peer = environment.endpoints.get(other)
    devices = [] if environment.full_internet else [["eth0", gateways[0]]]
    if peer and peer.private_address and devices:
        devices.append(["eth1", peer.private_address])
    return {
        "devices": devices,
        "canary_ports": [canary_port],
        "gateways": gateways,
        "peer": peer.private_address if peer else None,
        "allowed": [_target(destination) for destination in environment.allowed_destinations if _single(destination)],
        "agent": role == "primary",
    }


def _single(destination: Destination) -> bool:
    return destination.cidr.endswith("/32")


def _target(destination: Destination) -> list[str | int]:
    return [destination.cidr.removesuffix("/32"), destination.port]


def run(connection: Connection, role: Role, asked: dict[str, Any], full_internet: bool) -> tuple[ProbeResult, ...]:
    """Runs the probes in one machine.

    Returns:
        one result for each probe that the permission says something about.

    Raises:
        IsolationError: the machine did not answer properly; an unknown state counts as open.
    """
    try:
        answer = connection.run(
            ["python3", "-I", PROGRAM],
            stdin=json.dumps(asked).encode(),
            timeout_seconds=PROBE_SECONDS,
            limit_bytes=ANSWER_LIMIT_BYTES,
        )
        seen = TypeAdapter(list[_Seen]).validate_json(answer.stdout)
    except (ValidationError, TimeoutError, MachineLostError) as error:
        raise IsolationError(
            f"The isolation of the {role} machine could not be probed: {type(error).__name__}.",
            hint="Nothing was started in it. `--debug` shows the machine's answer.",
        ) from error
    return judge(role, seen, full_internet)


def judge(role: Role, seen: list[_Seen], full_internet: bool) -> tuple[ProbeResult, ...]:
    """Sets what was reached against what the permission promises. Pure."""
    results = []
    for one in seen:
        expected = _expected(one.probe, full_internet)
        if expected is not None:
            results.append(
                ProbeResult(
                    machine=role,
                    user=one.user,
                    probe=one.probe,
                    reached=one.reached,
                    expected=expected,
                    detail=one.detail,
                )
            )
    return tuple(results)


def _expected(probe: str, full_internet: bool) -> bool | None:
    if probe.startswith(PROMISED_ALWAYS):
        return True
    if not full_internet:
        return False
    if probe.startswith(PROMISED_ONLINE):
        return True
    return False if probe.startswith(FORBIDDEN_ONLINE) else None


def require(results: tuple[ProbeResult, ...], canary_visited: bool) -> None:
    """Fails closed.

    Raises:
        IsolationError: no probe ran, one shows more or less than the permission promises, or the canary had a visitor.
    """
    if not results:
        raise IsolationError("No isolation probe gave an answer.")
    wrong = [result for result in results if result.reached != result.expected]
    if canary_visited and not wrong:
        raise IsolationError("A machine reached the controller's loopback.")
    if wrong:
        lines = [
            f"{r.machine} machine, as {r.user}: {r.probe}: {'reached' if r.reached else 'not reached'} ({r.detail})"
            for r in wrong[:12]
        ]
        raise IsolationError(
            f"The environment is not isolated as promised: {len(wrong)} of {len(results)} probes differ.",
            details="\n".join(lines),
            hint="The environment was torn down. docs/explanation/isolation.md explains the probes.",
        )
