"""A machine fills the disk of its host, and QEMU pauses other machines: they resume once there is room again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import BOUND_SECONDS

pytestmark = pytest.mark.campaign

ROOT = Path(__file__).parents[2]


def test_a_machine_without_disk_resumes_once_there_is_room() -> None:
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    done = subprocess.run(
        ["unshare", *user, "--mount", sys.executable, "-m", "tests.attacks.full_disk"],
        cwd=ROOT, capture_output=True, text=True, timeout=BOUND_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert (seen["full"], seen["still_full"], seen["with_room"]) == ("io-error", "io-error", "running")
    assert seen["used_mib_when_full"] <= 8
    assert seen["used_mib_with_room"] > 9  # and repeats what it could not write
