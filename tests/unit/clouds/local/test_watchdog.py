"""The end of a machine whose directory was removed while it ran."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from provisioner.clouds.local import watchdog
from tests.command_line import ROOT
from tests.waiting import BOUND_SECONDS

# Holds the lock on the pidfile as QEMU does, and tells when the watchdog has asked for the machine's port.
QEMU = """
import fcntl, signal, socket
port = socket.socket(socket.AF_UNIX)
port.bind("credentials.sock")
port.listen()
pidfile = open("qemu.pid", "w")
fcntl.lockf(pidfile, fcntl.LOCK_EX)
connection = port.accept()
print("watched", flush=True)
signal.pause()
"""


def test_a_machine_whose_directory_is_removed_ends(tmp_path: Path) -> None:
    directory = tmp_path / "primary"
    directory.mkdir()
    (directory / watchdog.EXPIRY).write_text(str(time.time() + 3600))
    bystander = subprocess.Popen(["sleep", "1000"], cwd=directory)
    machine = subprocess.Popen([sys.executable, "-c", QEMU], cwd=directory, stdout=subprocess.PIPE)
    watching = subprocess.Popen(
        [sys.executable, "-m", watchdog.__name__], cwd=directory, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    try:
        assert machine.stdout
        assert machine.stdout.readline() == b"watched\n"
        (directory / "qemu.pid").unlink()
        shutil.rmtree(directory)
        assert watching.wait(BOUND_SECONDS) == 0
        assert machine.wait(BOUND_SECONDS) == -signal.SIGKILL
        assert bystander.poll() is None
    finally:
        if machine.stdout:
            machine.stdout.close()
        for process in (watching, machine, bystander):
            process.kill()
            process.wait()
