"""Atomic files, locks and the removal of trees."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from provisioner.store.files import remove_tree, write_atomically
from provisioner.store.home import Home
from provisioner.store.locks import is_locked, locked

PROCESSES = multiprocessing.get_context("spawn")


def hold(path: Path, held: Event) -> None:
    with locked(path):
        held.set()
        time.sleep(60)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_file_is_replaced_whole_and_private(tmp_path: Path) -> None:
    path = tmp_path / "record"
    write_atomically(path, "old")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "record"
    write_atomically(path, "old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_lock_excludes_other_processes_and_is_free_when_its_holder_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "locks" / "one"
    held = PROCESSES.Event()
    holder = PROCESSES.Process(target=hold, args=(path, held))
    holder.start()
    assert held.wait(20)
    assert is_locked(path)
    assert holder.pid is not None
    os.kill(holder.pid, signal.SIGKILL)
    told: list[bool] = []
    with locked(path, on_wait=lambda: told.append(True)):
        assert is_locked(path)
    holder.join()
    assert not is_locked(path)


def test_who_waits_for_a_lock_is_told(tmp_path: Path) -> None:
    path = tmp_path / "one"
    held = PROCESSES.Event()
    holder = PROCESSES.Process(target=hold, args=(path, held))
    holder.start()
    assert held.wait(20)
    with pytest.raises(InterruptedError), locked(path, on_wait=_stop):
        pass
    holder.kill()
    holder.join()
    wait_until(lambda: not is_locked(path))


def _stop() -> None:
    raise InterruptedError


def test_a_home_is_for_its_owner_alone(tmp_path: Path) -> None:
    home = Home(tmp_path / "deep" / "home")
    home.make()
    home.make()
    assert home.root.stat().st_mode & 0o777 == 0o700
    made = {path.name for path in home.root.iterdir()}
    assert made == {"images", "locks", "environments", "stacks", "archive", "batches"}


def test_a_tree_is_removed_and_a_missing_one_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "tree" / "deep").mkdir(parents=True)
    (tmp_path / "tree" / "deep").chmod(0o500)
    remove_tree(tmp_path / "tree")
    remove_tree(tmp_path / "tree")
    assert list(tmp_path.iterdir()) == []
