"""Keeps what all commands of a home launch in a region within the rate at which EC2 takes it.

RunInstances has a bucket of five tokens, which gets two a second (Amazon EC2 developer guide, "Request throttling for
the Amazon EC2 API"). Terraform limits the requests of one apply, and cannot know of the others.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from provisioner.store.files import write_atomically
from provisioner.store.locks import locked

BUCKET = 5
PER_SECOND = 2.0
# A caller that waits longer is told why.
TOLD_SECONDS = 5.0
# The clock counts from the host's boot: what lies further ahead was noted before the last one.
AHEAD_SECONDS = 3600.0
CHECK_SECONDS = 0.5


def await_turn(path: Path, machines: int, tell: Callable[[str], None], check: Callable[[], None]) -> None:
    """Waits until EC2 takes the first requests of an apply, and counts all of them.

    An apply asks for as many machines at once as the bucket holds, and for another when one of them runs, which takes
    ten seconds or more: it comes no faster than the bucket fills.

    Args:
        path: where the processes of a home note what they launch in a region.
        machines: how many the apply launches.
        tell: receives a line if it takes long.
        check: called regularly while it waits; an exception that it raises ends the wait.
    """
    with locked(path.with_suffix(".lock")):
        begin = time.monotonic()
        start, tokens = turn(*_noted(path, begin), begin, machines)
        write_atomically(path, json.dumps([tokens, start]))
    if start - begin > TOLD_SECONDS:
        tell(f"Waiting {start - begin:.0f} s: EC2 takes two launches a second, and other environments come first")
    while (left := start - time.monotonic()) > 0:
        check()
        time.sleep(min(left, CHECK_SECONDS))


def turn(tokens: float, noted_at: float, now: float, machines: int) -> tuple[float, float]:
    """Decides when an apply may begin. Pure.

    Args:
        tokens: how many there were at `noted_at`, which may lie ahead; negative if launches will use what is to come.
        noted_at: in seconds, as `now`.
        machines: how many the apply launches.

    Returns:
        when it begins, and the tokens that are left then.
    """
    present = min(float(BUCKET), tokens + (now - noted_at) * PER_SECOND)
    wait_seconds = max(0.0, (min(machines, BUCKET) - present) / PER_SECOND)
    return now + wait_seconds, present + wait_seconds * PER_SECOND - machines


def _noted(path: Path, now: float) -> tuple[float, float]:
    """Returns the tokens and when they were counted; a full bucket if nothing is noted, or nothing that can be true."""
    try:
        tokens, at = (float(value) for value in json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return float(BUCKET), now
    return (tokens, at) if abs(tokens) < AHEAD_SECONDS and at < now + AHEAD_SECONDS else (float(BUCKET), now)
