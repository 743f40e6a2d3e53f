"""Helps tests of connections to machines that OpenSSH keeps, and finds the processes that it keeps them in."""

from __future__ import annotations

from pathlib import Path

import pytest

from provisioner.machines import connect
from provisioner.ssh import openssh
from tests.waiting import BOUND_SECONDS


def be_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets OpenSSH and machines take their time: on a busy host, a command would connect by itself."""
    for name in ("START_SECONDS", "ANSWER_SECONDS", "LOCAL_SECONDS", "IDLE_SECONDS"):
        monkeypatch.setattr(openssh, name, int(BOUND_SECONDS))
    monkeypatch.setattr(connect, "START_SECONDS", BOUND_SECONDS)


def keepers(directory: Path) -> list[int]:
    """Returns the OpenSSH clients that work in an environment's directory, also if it is gone."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            its_directory = str((process / "cwd").readlink()).removesuffix(" (deleted)")
            if its_directory == str(directory.resolve()) and (process / "comm").read_text() == "ssh\n":
                found.append(int(process.name))
        except OSError:  # it has ended
            continue
    return found
