"""A hole in an environment's isolation leads through a slow network that loses packets.

The probes wait for a second only, and still find whatever a path with a long round trip leads to.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.attacks.slow_network import PROBES, WORD
from tests.waiting import BOUND_SECONDS

pytestmark = pytest.mark.campaign

ROOT = Path(__file__).parents[2]


def probed(round_trip_seconds: float, loss: str) -> dict[str, Any]:
    """Runs the probe program over a slow line, in network namespaces of its own."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    done = subprocess.run(
        ["unshare", *user, "--net", sys.executable, "-m", "tests.attacks.slow_network", f"{round_trip_seconds}", loss],
        cwd=ROOT, capture_output=True, text=True, timeout=BOUND_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize(
    ("round_trip_seconds", "loss"), [(0.0, "none"), (0.5, "none"), (0.3, "first")], ids=["quick", "slow", "lossy"]
)
def test_an_open_path_is_found_however_slow_it_is(round_trip_seconds: float, loss: str) -> None:
    """The canary never answers a datagram, but hears the word."""
    seen = probed(round_trip_seconds, loss)
    outcomes = {name: outcome for _, name, outcome, _ in seen["answers"]}
    assert outcomes == {name: "not reached" if name == "knock_udp" else "reached" for name in PROBES}
    assert seen["heard"] == [f"tcp {WORD}", f"udp {WORD}"]


def test_promised_questions_may_take_longer() -> None:
    seen = probed(3.0, "none")
    reached = {name for _, name, outcome, _ in seen["answers"] if outcome == "reached"}
    assert reached == {name for name, (promised, _, _) in PROBES.items() if promised}
    assert {outcome for _, _, outcome, _ in seen["answers"]} == {"reached", "not reached"}
