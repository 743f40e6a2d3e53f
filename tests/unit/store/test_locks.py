"""Tests locks between processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

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


def test_a_lock_excludes_other_processes_and_is_released_when_its_holder_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "locks" / "one"
    held = PROCESSES.Event()
    holder = PROCESSES.Process(target=hold, args=(path, held))
    holder.start()
    assert held.wait(20)
    assert is_locked(path)
    assert holder.pid is not None
    os.kill(holder.pid, signal.SIGKILL)
    waited: list[bool] = []
    with locked(path, on_wait=lambda: waited.append(True)):
        assert is_locked(path)
    holder.join()
    assert not is_locked(path)


def test_a_process_that_waits_for_a_lock_is_notified(tmp_path: Path) -> None:
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
