"""Encloses real programs."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from provisioner.clouds.local.vm import bubblewrap
from tests.waiting import BOUND_SECONDS


def said(prefix: list[str], *argv: str) -> str:
    done = subprocess.run([*prefix, *argv], capture_output=True, text=True, timeout=BOUND_SECONDS, check=False)
    return done.stdout + done.stderr


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that is no package's, by a link in PATH to a place where other files lie."""
    own, elsewhere = tmp_path / "bin", tmp_path / "elsewhere"
    own.mkdir()
    elsewhere.mkdir()
    (elsewhere / "secret").write_text("a secret")
    found = elsewhere / "program"
    found.write_text("#!/bin/sh\nls $(dirname $(readlink -f $0))\n")
    found.chmod(0o755)
    (own / "program").symlink_to(found)
    monkeypatch.setenv("PATH", f"{own}:{os.environ['PATH']}")
    return found


def test_a_program_elsewhere_is_found_and_sees_nothing_beside_it(program: Path) -> None:
    assert said(bubblewrap.command("program"), "program") == "program\n"


def test_what_is_named_is_seen_in_its_place_and_written_only_if_it_may_be(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    read, written = tmp_path / "link" / "a file, to read", tmp_path / "real" / "written"
    read.write_text("read")
    written.touch()
    prefix = bubblewrap.command("sh", readable=[read], writable=[written])
    assert said(prefix, "cat", str(read), str(read.resolve())) == "readread"
    said(prefix, "sh", "-c", f"echo kept > {written}; echo lost > '{read}'; echo lost > {tmp_path}/real/new")
    assert (read.read_text(), written.read_text()) == ("read", "kept\n")
    assert sorted(path.name for path in read.parent.iterdir()) == ["a file, to read", "written"]


def test_a_started_programs_own_pid_ends_it(tmp_path: Path) -> None:
    process, pid = bubblewrap.start(bubblewrap.command("sleep"), ["sleep", "1000"], [])
    assert pid != process.pid
    os.kill(pid, signal.SIGKILL)
    assert process.wait(BOUND_SECONDS) == 128 + signal.SIGKILL


def test_what_cannot_be_enclosed_ends_at_once(tmp_path: Path) -> None:
    process, _ = bubblewrap.start(bubblewrap.command("true", readable=[tmp_path / "gone"]), ["true"], [])
    assert process.wait(BOUND_SECONDS) == 1
