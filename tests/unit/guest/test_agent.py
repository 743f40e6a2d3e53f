"""What keeps the agent's output, and what ends its processes, as far as a host shows it.

environment/test_agent.py runs the rest of agent.py, and tests/attacks a real machine.
"""

from __future__ import annotations

import os
import pwd
import random
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from agent import CHUNK_BYTES, Ring
from provisioner_guest import cgroup
from provisioner_guest.family.parent import is_agents, own_cgroup
from sent import agent_end

from provisioner.clouds.guest_files import GUEST
from tests.waiting import BOUND_SECONDS, until

CAPACITY_BYTES = 4 * CHUNK_BYTES
NOBODY = 65534
# In a mount namespace in which no cgroup can be made. The login is a shell, which lives on if it is not ended.
LOGIN = """
mount -t tmpfs -o ro none /sys/fs/cgroup
PAM_TYPE=open_session sh -c 'sh "$0" login; sleep 1; echo lives on' "$0" 2> /dev/null
echo "$?"
"""
SEGMENTS = """       key      shmid perms                  size  cpid  lpid nattch   uid   gid  cuid  cgid
         0          3  1600                  4096   801   801      0  1000  1000  1000  1000
         0          4  1600                  4096   801   801      1  1000  1000  1000  1000
         0          5  1600                  4096   801   801      0     0     0     0     0
"""


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[Ring]:
    descriptor = os.open(tmp_path / "ring", os.O_RDWR | os.O_CREAT)
    yield Ring(descriptor, CAPACITY_BYTES)
    os.close(descriptor)


def test_a_follower_reads_what_was_written_since(ring: Ring) -> None:
    assert ring.read(0) == (0, b"")
    ring.write(b"abc")
    ring.write(b"def")
    assert [ring.read(offset) for offset in (0, 4, 6)] == [(0, b"abcdef"), (4, b"ef"), (6, b"")]


def test_the_file_is_bounded_and_keeps_the_end(ring: Ring, tmp_path: Path) -> None:
    chance, written = random.Random(7), b""
    for _ in range(60):
        piece = chance.randbytes(chance.randint(1, CHUNK_BYTES))
        ring.write(piece)
        written += piece
    first, kept = ring.read(0)
    while piece := ring.read(first + len(kept))[1]:
        kept += piece
    assert written[first:] == kept
    assert len(kept) >= CAPACITY_BYTES - CHUNK_BYTES
    assert (tmp_path / "ring").stat().st_size <= CAPACITY_BYTES + 8


def test_the_exec_server_finds_the_program_of_the_agents_cgroup() -> None:
    assert Path(cgroup.AGENT_PROGRAM) == GUEST / "agent_cgroup.sh"


def test_a_login_that_cannot_be_put_into_the_agents_cgroup_ends() -> None:
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    argv = ["unshare", *user, "--mount", "sh", "-c", LOGIN, str(GUEST / "agent_cgroup.sh")]
    assert subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split() == ["137"]


def test_the_agents_processes_are_found_in_user_namespaces() -> None:
    assert is_agents(os.getpid(), os.getuid())
    assert not is_agents(os.getpid(), NOBODY)
    with subprocess.Popen(["unshare", "--user", "sleep", "600"]) as other:
        try:
            until(lambda: is_agents(other.pid, NOBODY))
        finally:
            other.kill()
    with pytest.raises(OSError, match="No such"):
        is_agents(other.pid, NOBODY)


def test_outside_of_a_call_there_is_nothing_to_settle() -> None:
    assert own_cgroup() is None


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Provides the cgroups of a machine in which the agent has run."""
    (tmp_path / "cgroups/agent").mkdir(parents=True)
    for name in ("cgroup.subtree_control", "agent/pids.max", "agent/cgroup.kill"):
        (tmp_path / "cgroups" / name).touch()
    populated(tmp_path, 0)
    (tmp_path / "segments").write_text("key\n")
    (tmp_path / "inodes").mkdir()
    (tmp_path / "inodes/1").touch()
    return tmp_path


def populated(root: Path, value: int) -> None:
    (root / "new").write_text(f"populated {value}\nfrozen 0\n")
    (root / "new").rename(root / "cgroups/agent/cgroup.events")


def end(root: Path) -> None:
    agent_end.main(str(root / "cgroups"), str(root / "inodes"), str(root / "segments"))


def test_nothing_is_let_in_until_all_have_ended(root: Path) -> None:
    populated(root, 1)
    ender = threading.Thread(target=end, args=(root,))
    ender.start()
    while not (root / "cgroups/agent/cgroup.kill").read_text():
        ender.join(0.01)
    assert ender.is_alive()
    assert (root / "cgroups/agent/pids.max").read_text() == "0"
    assert (root / "cgroups/agent/logins").is_dir()
    populated(root, 0)
    ender.join(BOUND_SECONDS)
    assert not ender.is_alive()


def test_processes_that_do_not_end_are_told(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_end, "SECONDS", 0.05)
    populated(root, 1)
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
    (root / "segments").write_text(SEGMENTS)
    end(root)
    assert removed == [["ipcrm", "-m", "3"]]
