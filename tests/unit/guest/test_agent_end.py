"""Tests what ends the agent's processes before scoring, on a directory in the place of the cgroups."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from provisioner.clouds.guest_files import SENT

sys.path.insert(0, str(SENT))
import agent_end  # type: ignore[import-not-found]

from tests.waiting import BOUND_SECONDS

SEGMENTS = """       key      shmid perms                  size  cpid  lpid nattch   uid   gid  cuid  cgid
         0          3  1600                  4096   801   801      0   {agent}  1000  1000  1000
         0          4  1600                  4096   801   801      1   {agent}  1000  1000  1000
         0          5  1600                  4096   801   801      0     0     0     0     0
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Provides the cgroups of a machine in which the agent has run."""
    (tmp_path / "cgroups/agent").mkdir(parents=True)
    (tmp_path / "cgroups/cgroup.subtree_control").touch()
    for name in ("pids.max", "cgroup.kill"):
        (tmp_path / "cgroups/agent" / name).touch()
    populated(tmp_path / "cgroups", 0)
    (tmp_path / "segments").write_text("key\n")
    (tmp_path / "inodes").mkdir()
    (tmp_path / "inodes/1").touch()
    return tmp_path


def populated(cgroups: Path, value: int) -> None:
    events = cgroups / "agent/cgroup.events"
    events.with_name("new").write_text(f"populated {value}\nfrozen 0\n")
    events.with_name("new").rename(events)


def end(root: Path) -> None:
    agent_end.main(str(root / "cgroups"), str(root / "inodes"), str(root / "segments"))


def test_it_lets_nothing_in_and_waits_until_all_have_ended(root: Path) -> None:
    populated(root / "cgroups", 1)
    ender = threading.Thread(target=end, args=(root,))
    ender.start()
    while not (root / "cgroups/agent/cgroup.kill").read_text():
        ender.join(0.01)
    assert ender.is_alive()
    assert (root / "cgroups/agent/pids.max").read_text() == "0"
    assert (root / "cgroups/agent/logins").is_dir()
    populated(root / "cgroups", 0)
    ender.join(BOUND_SECONDS)
    assert not ender.is_alive()


def test_processes_that_do_not_end_are_told(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_end, "SECONDS", 0.05)
    populated(root / "cgroups", 1)
    with pytest.raises(SystemExit, match="processes of the agent do not end"):
        end(root)


def test_a_machine_without_cgroups_is_told_of_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="No such file or directory"):
        end(tmp_path)


@pytest.mark.parametrize(("free", "kept"), [(999, False), (1000, True)])
def test_the_kept_inodes_are_given_to_a_scoring_that_has_few(
    root: Path, monkeypatch: pytest.MonkeyPatch, free: int, kept: bool
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_favail=free))
    end(root)
    assert (root / "inodes").exists() is kept


def test_the_agents_unused_segments_are_removed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[list[str]] = []
    monkeypatch.setattr(pwd, "getpwnam", lambda _: SimpleNamespace(pw_uid=1000))
    monkeypatch.setattr(subprocess, "run", lambda argv, **_: removed.append(argv))
    (root / "segments").write_text(SEGMENTS.format(agent=1000))
    end(root)
    assert removed == [["ipcrm", "-m", "3"]]
