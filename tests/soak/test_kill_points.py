"""Tests a sample of `scripts/soak kill-points`: after a kill of controller or Terraform, a sweep leaves nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.command_line import ROOT


@pytest.mark.vm
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("cloud", "count"), [("local", 1), ("aws", 2)])
def test_nothing_is_left_wherever_it_was_killed(cloud: str, count: int) -> None:
    # Each seed gives other moments; the whole campaign covers many.
    argv = [sys.executable, "-m", "tests.soak.kill_points", "--cloud", cloud, "--points", str(count), "--workers", "1"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=1400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("nothing left") == count
    assert "all clean" in done.stdout
