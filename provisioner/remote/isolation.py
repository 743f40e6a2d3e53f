"""Tests isolation by sending packets: runs the guest's probe program and judges its results. Fails closed."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

from provisioner import strict_json
from provisioner.errors import IsolationError, MachineLostError
from provisioner.models import Destination, Environment, ProbeResult, Record, Role
from provisioner.remote.ssh import Connection

PROGRAM = "/usr/lib/provisioner/guest/probe.py"
PROBE_SECONDS = 60
ANSWER_LIMIT_BYTES = 1 << 20

# Without the permission full_internet, every probe except these must fail. guest/probe.py has the whole list.
PROMISED_ALWAYS = ("neighbour ", "allowed ")
# With full_internet, only these are judged: the first must succeed, the others must still fail.
PROMISED_ONLINE = ("reach the internet by name",)
FORBIDDEN_ONLINE = ("controller's loopback ", "metadata ", "ipv6")


class _ProbeReport(Record):
    user: str
    probe: str
    reached: bool
    detail: str


class Canary:
    """Listens on the controller's loopback, which no machine may reach, and records whether one did."""

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
    """Runs a canary until the context ends."""
    listener = Canary()
    try:
        yield listener
    finally:
        listener.close()


def request(environment: Environment, role: Role, canary_port: int, gateways: list[str]) -> dict[str, Any]:
    """Returns the request to the probe program of one machine. Pure.

    Args:
        environment: the machine's environment.
        role: the machine.
        canary_port: the port of a listener on the controller's loopback.
        gateways: addresses at which a machine might reach the controller.
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


def run(
    connection: Connection, role: Role, probe_request: dict[str, Any], full_internet: bool
) -> tuple[ProbeResult, ...]:
    """Runs the probes in one machine.

    Args:
        connection: root's connection to the machine.
        role: the machine.
        probe_request: the request from `request`.
        full_internet: whether the task has that permission.

    Returns:
        a result for each probe that the permission promises or forbids.

    Raises:
        IsolationError: the machine gave no valid answer; an unknown state counts as open.
    """
    try:
        answer = connection.run(
            ["python3", "-I", PROGRAM],
            stdin=json.dumps(probe_request).encode(),
            timeout_seconds=PROBE_SECONDS,
            limit_bytes=ANSWER_LIMIT_BYTES,
        )
        reports = strict_json.load(list[_ProbeReport], answer.stdout)
    except (ValueError, TimeoutError, MachineLostError) as error:
        raise IsolationError(
            f"The isolation of the {role} machine could not be probed: {type(error).__name__}.",
            hint="Nothing was started in it. `--debug` shows the machine's answer.",
        ) from error
    return judge(role, reports, full_internet)


def judge(role: Role, reports: list[_ProbeReport], full_internet: bool) -> tuple[ProbeResult, ...]:
    """Compares what the probes reached with what the permission promises. Pure."""
    results = []
    for report in reports:
        expected = _expected(report.probe, full_internet)
        if expected is not None:
            results.append(
                ProbeResult(
                    machine=role,
                    user=report.user,
                    probe=report.probe,
                    reached=report.reached,
                    expected=expected,
                    detail=report.detail,
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
    """Requires that the probes confirm the isolation.

    Raises:
        IsolationError: no probe ran, one reached more or less than the permission promises, or a machine reached the
            canary.
    """
    if not results:
        raise IsolationError("No isolation probe gave a result.")
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
