"""Tests locks between processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from provisioner.store.locks import holders, is_locked, locked, openers
from tests.waiting import BOUND_SECONDS, until

PROCESSES = multiprocessing.get_context("spawn")


def hold(path: Path, held: Event) -> None:
    with locked(path):
        held.set()
        signal.pause()


def test_a_lock_is_exclusive_and_ends_with_its_holder(tmp_path: Path) -> None:
    path = tmp_path / "locks" / "one"
    held = PROCESSES.Event()
    holder = PROCESSES.Process(target=hold, args=(path, held))
    holder.start()
    assert held.wait(BOUND_SECONDS)
    assert is_locked(path)
    assert holder.pid is not None
    os.kill(holder.pid, signal.SIGKILL)
    waited: list[bool] = []
    with locked(path, on_wait=lambda: waited.append(True)):
        assert is_locked(path)
    holder.join()
    assert not is_locked(path)


def test_a_process_that_only_reads_a_file_does_not_hold_it(tmp_path: Path) -> None:
    path = tmp_path / "one"
    held = PROCESSES.Event()
    holder = PROCESSES.Process(target=hold, args=(path, held))
    holder.start()
    assert held.wait(BOUND_SECONDS)
    with path.open():
        assert holders(path) == [holder.pid]
        assert openers(path) == sorted([os.getpid(), holder.pid or 0])
    holder.kill()
    holder.join()
    assert holders(path) == openers(path) == []


def test_a_process_that_waits_for_a_lock_is_notified(tmp_path: Path) -> None:
    path = tmp_path / "one"
    held = PROCESSES.Event()
    holder = PROCESSES.Process(target=hold, args=(path, held))
    holder.start()
    assert held.wait(BOUND_SECONDS)
    with pytest.raises(InterruptedError), locked(path, on_wait=_stop):
        pass
    holder.kill()
    holder.join()
    until(lambda: not is_locked(path))


def _stop() -> None:
    raise InterruptedError
