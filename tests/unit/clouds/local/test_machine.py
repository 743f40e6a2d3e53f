"""The end of a local machine that was cut short while it started."""

from __future__ import annotations

import subprocess
from pathlib import Path

from provisioner.clouds.local import machine


def test_a_qemu_that_has_not_yet_locked_its_pidfile_is_ended_too(tmp_path: Path) -> None:
    directory = tmp_path / "primary"
    directory.mkdir()
    # Stands for a QEMU in its first moment: it has inherited the file, and written nothing yet.
    with (directory / machine.OPEN_FILE).open("wb") as inherited:
        young = subprocess.Popen(["sleep", "60"], pass_fds=[inherited.fileno()])
    try:
        machine.destroy(directory)
        assert young.wait(timeout=5) != 0
        assert not directory.exists()
    finally:
        young.kill()


def test_a_machine_that_is_gone_is_destroyed_again_without_a_word(tmp_path: Path) -> None:
    machine.destroy(tmp_path / "primary")
