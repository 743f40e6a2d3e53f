"""The script that makes a base image of a vendor's machine, with programs that stand in for apt's."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from provisioner.clouds.guest_files import BASE_IMAGE
from tests.waiting import BOUND_SECONDS

LOCKED = "E: Could not get lock /var/lib/apt/lists/lock. It is held by process 7 (apt-get)"
INSTALL_FAILS = 7


def prepare(directory: Path, update: str) -> tuple[int, list[str]]:
    """Runs the script until it installs packages, which fails. Returns its exit code and apt-get's calls."""
    programs = {
        "apt-get": f'echo "$*" >> calls\ncase $* in *update) {update} ;; *) exit {INSTALL_FAILS} ;; esac',
        "sleep": "",
        "sysctl": 'echo "$*" >> settings',
    }
    for name, text in programs.items():
        (directory / name).write_text(f"#!/bin/sh\n{text}\n")
        (directory / name).chmod(0o755)
    done = subprocess.run(
        ["sh", BASE_IMAGE / "prepare.sh", "primary", str(directory), "curl"], cwd=directory, check=False,
        timeout=BOUND_SECONDS,
        env={"PATH": f"{directory}:{os.environ['PATH']}"}, capture_output=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return done.returncode, (directory / "calls").read_text().splitlines()


def test_a_packet_too_large_for_the_path_is_found_first(tmp_path: Path) -> None:
    prepare(tmp_path, "true")
    assert (tmp_path / "settings").read_text().split() == ["-q", "-w", "net.ipv4.tcp_mtu_probing=1"]


def test_the_lock_of_the_package_lists_is_waited_for(tmp_path: Path) -> None:
    code, calls = prepare(tmp_path, f'[ "$(wc -l < calls)" -ge 4 ] || {{ echo "{LOCKED}" >&2; exit 100; }}')
    assert code == INSTALL_FAILS
    assert [call.split()[-1] for call in calls[:4]] == ["update"] * 4
    assert "install" in calls[4]


@pytest.mark.parametrize(("said", "tries"), [(LOCKED, 24), ("E: The repository has no Release file", 1)])
def test_what_does_not_pass_ends_the_build(tmp_path: Path, said: str, tries: int) -> None:
    code, calls = prepare(tmp_path, f'echo "{said}" >&2; exit 100')
    assert (code, len(calls)) == (100, tries)
