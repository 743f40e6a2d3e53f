"""A process's start time, and whether it lives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from provisioner.clouds.local.vm.processes import FIRST, LAST, NOBODY, User, is_alive, is_stopped, own_user, start_time
from tests.waiting import until

# Gives itself a name that is no UTF-8 and looks like a zombie's, then ends its first thread alone (exit(2)).
DISGUISED = r"""
import ctypes, threading
libc = ctypes.CDLL(None)
libc.prctl(15, b"\xff) Z 1 1", 0, 0, 0)  # PR_SET_NAME
threading.Thread(target=input).start()
libc.pthread_exit(None)
"""


def test_only_a_living_process_has_a_start_time() -> None:
    assert start_time(os.getpid()) == start_time(os.getpid()) is not None
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert start_time(ended.pid) is None


def test_a_process_that_ended_is_not_alive_before_it_is_reaped() -> None:
    started = start_time(os.getpid())
    assert started
    assert is_alive(os.getpid(), started)
    assert not is_alive(os.getpid(), f"{started}0")
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    started = start_time(process.pid)
    assert started
    assert is_alive(process.pid, started)
    process.kill()
    until(lambda: not is_alive(process.pid, started))
    assert start_time(process.pid) == started
    process.communicate()


def test_a_process_that_a_signal_stops_is_told() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        assert not is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        until(lambda: is_stopped(process.pid))
        process.kill()
        process.wait()
        assert not is_stopped(process.pid)


def test_a_process_without_its_first_thread_is_alive() -> None:
    with subprocess.Popen([sys.executable, "-c", DISGUISED], stdin=subprocess.PIPE) as process:
        try:
            stat = Path(f"/proc/{process.pid}/stat")
            until(lambda: stat.read_bytes().rpartition(b")")[2].split()[0] == b"Z", lambda: process.poll() is None)
            started = start_time(process.pid)
            assert started
            assert is_alive(process.pid, started)
        finally:
            process.kill()


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Pretends to be root; returns a directory with the maps of a process outside any user namespace."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    for name in ("uid_map", "gid_map"):
        (tmp_path / name).write_text("         0          0 4294967295\n")
    return tmp_path


def test_no_two_machines_have_one_user(root: Path) -> None:
    users = [own_user(Path("/home/environments/one"), root) for _ in range(20)]
    other = own_user(Path("/home/environments/two"), root)
    assert len({user.uid for user in users if user}) == 20
    assert len({user.gid for user in users if user}) == 1
    assert other is not None
    assert other.gid not in {user.gid for user in users if user}
    assert all(FIRST <= number <= LAST for user in users if user for number in (user.uid, user.gid))


@pytest.mark.parametrize("narrow", ["uid_map", "gid_map"])
def test_a_container_without_such_ids_uses_the_user_nobody(root: Path, narrow: str) -> None:
    (root / narrow).write_text("0 1000 1\n1 100000 65536\n")
    assert own_user(Path("/e"), root) == User(NOBODY, NOBODY)


def test_an_ordinary_user_keeps_its_own(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert own_user(Path("/e"), root) is None
