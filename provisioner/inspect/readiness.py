"""Waits until a machine of a sample is ready, and tells of its services that end again and again."""

from __future__ import annotations

import time
from collections.abc import Callable

from provisioner.errors import CommandTimeoutError
from provisioner.inspect.configuration import Machine
from provisioner.inspect.losses import NotUpError
from provisioner.printable import last_lines, printable_lines
from provisioner.ssh.calls import Calls

READY_SECONDS = 300.0
# A service that has ended stays up if it does so for STEADY_SECONDS. If it fails for longer than FAILING_SECONDS, it
# never does. Where it has ended ENDS times before, that is told.
STEADY_SECONDS, FAILING_SECONDS, ENDS = 10.0, 60.0, 3
PAUSE_SECONDS = 1.0
# What a machine says is bounded: of a few properties of each service, and of the journal's last lines.
_MOST_BYTES = 64 << 10
_SHOWN_CHARACTERS = 2000
_CALL_SECONDS = 60.0
_WAIT = 'until bash -c "$1"; do sleep 0.5; done > /dev/null 2>&1'
_CONNECT = "exec 3<>/dev/tcp/127.0.0.1/{}"


def wait_until_ready(machine: Machine, connection: Calls, pause: Callable[[], None]) -> list[str]:
    """Waits until `ready` of a machine succeeds, and those of its services that have ended stay up.

    Args:
        pause: waits a moment; raises an exception if the sample was cancelled.

    Returns:
        what is to be told of services that have ended again and again.

    Raises:
        NotUpError: it does not become ready in READY_SECONDS, or a service fails for FAILING_SECONDS.
    """
    if machine.ready:
        _wait_for(machine, connection)
    services = dict(machine.services)
    if not services:
        return []
    begin = since = time.monotonic()
    ends: dict[str, int] = {}
    failed: set[str] = set()
    while True:
        before = ends
        ends, failing = _looked_at(services, connection)
        failed |= failing
        at = time.monotonic()
        since = since if ends == before else at
        if machine.ready or not any(ends.values()) or at - since >= STEADY_SECONDS:
            break
        if at - begin >= FAILING_SECONDS:
            if wrong := [name for name, count in ends.items() if name in failed and count >= ENDS]:
                said = f"{_said(machine, wrong[0], ends)}, and does not stay up."
                raise NotUpError(said, details=_journal(wrong[0], connection))
            break
        pause()
    return [
        f"{_said(machine, name, ends)}. It said last:\n{_journal(name, connection)}"
        for name, count in ends.items()
        if count >= ENDS
    ]


def _wait_for(machine: Machine, connection: Calls) -> None:
    command = _CONNECT.format(machine.ready) if isinstance(machine.ready, int) else machine.ready
    try:
        connection.run(["bash", "-c", _WAIT, "ready", command], timeout_seconds=READY_SECONDS)
    except CommandTimeoutError:
        ends, _ = _looked_at(dict(machine.services), connection)
        told = [f"{_said(machine, name, ends)}:\n{_journal(name, connection)}" for name, count in ends.items() if count]
        what = f"nothing listens at port {machine.ready}" if isinstance(machine.ready, int) else "`ready` fails"
        raise NotUpError(
            f"Machine {machine.name} is not ready: {what} after {READY_SECONDS:.0f} s.", details="\n".join(told)
        ) from None


def _looked_at(services: dict[str, str], connection: Calls) -> tuple[dict[str, int], set[str]]:
    """Returns how often each service has ended, and those whose last end was a failure."""
    units = {f"{name}.service": name for name in services}
    show = ["systemctl", "show", "--property=Id,NRestarts,Result", *units]
    said = connection.run(show, limit_bytes=_MOST_BYTES, timeout_seconds=_CALL_SECONDS).stdout.decode(errors="replace")
    ends, failing = {}, set()
    for block in said.split("\n\n"):
        state = dict(line.partition("=")[::2] for line in block.splitlines())
        if (name := units.get(state.get("Id", ""))) is not None:
            count = state.get("NRestarts", "")
            ends[name] = int(count) if count.isascii() and count.isdigit() and len(count) < 10 else 0
            failing |= {name} if state.get("Result", "success") != "success" else set()
    return ends, failing


def _said(machine: Machine, name: str, ends: dict[str, int]) -> str:
    return f"The service {name} of machine {machine.name} has ended {ends[name]} times"


def _journal(name: str, connection: Calls) -> str:
    """Returns the last lines of a service's journal."""
    show = ["journalctl", "--no-pager", "--output=cat", "--lines=20", f"--unit={name}.service"]
    done = connection.run(show, limit_bytes=_MOST_BYTES, timeout_seconds=_CALL_SECONDS)
    return last_lines(printable_lines(done.stdout.decode(errors="replace")), _SHOWN_CHARACTERS)
