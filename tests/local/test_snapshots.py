"""What becomes of a machine whose freezing was cut short. What copies share: tests/examples/test_snapshots.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from provisioner.base.models import BaseImage, Environment
from provisioner.base.progress import Silence
from provisioner.clouds.local import machine
from provisioner.clouds.local.frozen import snapshots, templates
from provisioner.clouds.local.frozen.snapshots import PAUSED_FILE
from provisioner.session import Session
from tests.command_line import ROOT
from tests.local.clones import in_directory, running

pytestmark = [pytest.mark.vm, pytest.mark.xdist_group("templates")]
# Freezes a machine, and waits to be killed where both QEMUs are at work and the machine stands still.
FREEZES = """
import json, sys, time
from pathlib import Path
from provisioner.clouds.local import machine
from provisioner.clouds.local.frozen import snapshots
from provisioner.clouds.local.vm import disk

directory, target = Path(sys.argv[1]), Path(sys.argv[3])
settings, gib = json.loads(sys.argv[4]), int(sys.argv[5])

def wait(*_):
    print("stands still", flush=True)
    time.sleep(600)

disk.copy = wait
subject = snapshots.Subject(directory, Path(sys.argv[2]), machine.described(directory, settings), gib, target)
snapshots.freeze([subject])
"""


def settings_of(session: Session, environment: Environment) -> dict[str, Any]:
    """How tests.local.clones starts a machine."""
    machine = environment.machines["primary"]
    return {
        "image": str(session.images.disk(machine.image)), "cpus": machine.size.cpus,
        "memory_gib": machine.size.memory_gib, "full_internet": False, "allowed_destinations": [],
    }  # fmt: skip


def test_a_machine_resumes_when_its_freezing_process_is_killed(
    open_session: Callable[[Mapping[str, str]], Session], tmp_path: Path
) -> None:
    session = open_session({})
    image = session.cloud.base_image(BaseImage(role="primary"), Silence())
    with running(session, image, 1) as [(environment, connection)]:
        directory, target = session.home.environments / environment.id / "primary", tmp_path / "frozen"
        argv = [sys.executable, "-c", FREEZES, str(directory), str(session.images.disk(image)), str(target)]
        gib = environment.machines["primary"].size.disk_gib
        argv += [json.dumps(settings_of(session, environment)), str(gib)]
        variables = {**os.environ, "PYTHONPATH": str(ROOT)}
        with subprocess.Popen(argv, env=variables, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "stands still\n"
            assert in_directory(target)
            process.send_signal(signal.SIGKILL)
        assert connection.run(["true"], timeout_seconds=60).exit_code == 0
        deadline = time.monotonic() + 10
        while in_directory(target) or (directory / PAUSED_FILE).exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        # It can be frozen as if nothing had been, and again, and continues each time.
        launch = machine.described(directory, settings_of(session, environment))
        for name in ("again", "and again"):
            subject = snapshots.Subject(directory, session.images.disk(image), launch, gib, tmp_path / name)
            snapshots.freeze([subject])
            assert templates.usable(templates.Template(subject.target), launch)
            assert connection.run(["true"], timeout_seconds=60).exit_code == 0
