"""A process's start time."""

from __future__ import annotations

import os
import subprocess

from provisioner.clouds.local.vm.processes import start_time


def test_only_a_living_process_has_a_start_time() -> None:
    assert start_time(os.getpid()) == start_time(os.getpid()) is not None
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert start_time(ended.pid) is None
