"""Gives machines a Python of their own, and tells what their warm interpreter does."""

from __future__ import annotations

import os
import time
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.unit.guest.machine_directory import Machine

# The command line of whoever waits for this process: a fork of the warm interpreter, or the helper.
WARM = "open(f'/proc/{__import__(\"os\").getppid()}/cmdline').read().endswith('child\\0')"


def with_python(machine: Machine) -> Machine:
    """Give a machine a Python of its own, which a test may change."""
    venv.create(machine.root / "python", symlinks=True)
    machine.path = f"{machine.root}/python/bin:{os.defpath}"
    settle()
    return machine


def settle() -> None:
    """Wait until what was just written is older than an interpreter that starts now, by a clock that ticks."""
    time.sleep(0.05)


def is_warm(machine: Machine, **keys: Any) -> bool:
    """Score, and return whether that was in a fork of a warm interpreter."""
    value = machine.score(f"return {WARM}", **keys).value
    assert isinstance(value, bool)
    return value


def is_there(pid: int) -> bool:
    """Return whether a process runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)
