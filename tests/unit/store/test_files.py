"""Tests that files are written completely or not at all, and that trees are removed."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from provisioner.base.errors import InfrastructureError
from provisioner.store import files as module
from provisioner.store.files import (
    Leases,
    disk_bytes,
    holders,
    is_locked,
    locked,
    openers,
    read_end,
    remove_tree,
    write_atomically,
)
from tests.waiting import BOUND_SECONDS, until


def test_a_file_is_replaced_completely_and_private(tmp_path: Path) -> None:
    path = tmp_path / "record"
    write_atomically(path, "old")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record"
    write_atomically(path, "old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_tree_is_removed_and_a_missing_one_is_not_an_error(tmp_path: Path) -> None:
    (tmp_path / "tree" / "deep").mkdir(parents=True)
    (tmp_path / "tree" / "deep").chmod(0o500)
    remove_tree(tmp_path / "tree")
    remove_tree(tmp_path / "tree")
    assert list(tmp_path.iterdir()) == []


def test_a_tree_is_removed_while_another_process_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    rmdir = os.rmdir
    late = ["record", "log"]

    def rmdir_after_a_write(path: str | Path, *, dir_fd: int | None = None) -> None:
        if late:
            (tree / late.pop()).write_text("late")
        rmdir(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "rmdir", rmdir_after_a_write)
    remove_tree(tree)
    assert (late, tree.exists()) == ([], False)


@pytest.mark.parametrize(("limit", "end"), [(3, b"def"), (6, b"abcdef"), (99, b"abcdef")])
def test_the_end_of_a_file_is_read(tmp_path: Path, limit: int, end: bytes) -> None:
    (tmp_path / "log").write_bytes(b"abcdef")
    assert read_end(tmp_path / "log", limit) == end
    assert read_end(tmp_path / "missing", limit) == b""


def test_the_size_of_a_changing_tree_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("kept", "gone"):
        (tmp_path / "deep").mkdir(exist_ok=True)
        (tmp_path / "deep" / name).write_bytes(b"x" * 8192)
    lstat = os.lstat

    def lstat_while_one_goes(path: Path) -> os.stat_result:
        (tmp_path / "deep" / "gone").unlink(missing_ok=True)
        return lstat(path)

    monkeypatch.setattr(os, "lstat", lstat_while_one_goes)
    assert disk_bytes(tmp_path) == (tmp_path / "deep" / "kept").stat().st_blocks * 512 > 0


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


@pytest.fixture
def leases(monkeypatch: pytest.MonkeyPatch) -> Iterator[Leases]:
    """Provides leases that are renewed every millisecond."""
    monkeypatch.setattr(module, "RENEW_SECONDS", 0.001)
    leases = Leases()
    yield leases
    for name in ("one", "two"):
        leases.release(name)


def test_a_lease_is_a_lock_until_it_is_released(leases: Leases, tmp_path: Path) -> None:
    leases.take("one", tmp_path / "one", lambda: None)
    leases.take("two", tmp_path / "two", lambda: None)
    leases.release("one")
    assert (is_locked(tmp_path / "one"), is_locked(tmp_path / "two")) == (False, True)


def test_taking_a_lease_again_changes_nothing(leases: Leases, tmp_path: Path) -> None:
    for _ in range(2):
        leases.take("one", tmp_path / "one", lambda: None)
    leases.release("one")
    assert not is_locked(tmp_path / "one")
    leases.release("one")


def test_a_lease_is_renewed_again_after_a_renewal_failed(leases: Leases, tmp_path: Path) -> None:
    again = threading.Event()
    answers: list[Exception | None] = [
        InfrastructureError("Throttled."),
        OSError("No route."),
        ValueError("Damaged."),
        None,
    ]

    def renew() -> None:
        if not answers:
            again.set()
        elif error := answers.pop(0):
            raise error

    leases.take("one", tmp_path / "one", renew)
    assert again.wait(BOUND_SECONDS)


def test_a_released_lease_is_not_renewed(leases: Leases, tmp_path: Path) -> None:
    renewed: list[str] = []
    first = threading.Event()

    def renew_one() -> None:
        renewed.append("one")
        first.set()

    leases.take("one", tmp_path / "one", renew_one)
    assert first.wait(BOUND_SECONDS)
    leases.release("one")
    rounds = threading.Semaphore(0)
    leases.take("two", tmp_path / "two", rounds.release)
    for _ in range(2):  # a round that had begun may still renew it
        assert rounds.acquire(timeout=BOUND_SECONDS)
    before = len(renewed)
    for _ in range(3):
        assert rounds.acquire(timeout=BOUND_SECONDS)
    assert len(renewed) == before


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Counts the leases that are about to wait for their file's lock."""
    about = threading.Semaphore(0)

    def counted(path: Path, wait_seconds: float) -> contextlib.AbstractContextManager[None]:
        about.release()
        return locked(path, wait_seconds=wait_seconds)

    monkeypatch.setattr(module, "locked", counted)
    monkeypatch.setattr(module, "ROUND_SECONDS", 0.01)
    return about


def begun(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def ended(thread: threading.Thread) -> bool:
    thread.join(BOUND_SECONDS)
    return not thread.is_alive()


def test_a_lease_that_another_process_has_holds_up_no_other(
    leases: Leases, waiting: threading.Semaphore, tmp_path: Path
) -> None:
    renewed = threading.Event()
    with locked(tmp_path / "one"):
        one = begun(lambda: leases.take("one", tmp_path / "one", lambda: None))
        assert waiting.acquire(timeout=BOUND_SECONDS)
        assert ended(begun(lambda: leases.take("two", tmp_path / "two", renewed.set)))
        assert renewed.wait(BOUND_SECONDS)
        assert one.is_alive()
    assert ended(one)
    leases.release("two")
    assert (is_locked(tmp_path / "one"), is_locked(tmp_path / "two")) == (True, False)


def test_a_lease_that_two_threads_take_at_once_is_held_once(
    leases: Leases, waiting: threading.Semaphore, tmp_path: Path
) -> None:
    with locked(tmp_path / "one"):
        takers = [begun(lambda: leases.take("one", tmp_path / "one", lambda: None)) for _ in range(2)]
        assert waiting.acquire(timeout=BOUND_SECONDS)
    assert all(ended(taker) for taker in takers)
    assert is_locked(tmp_path / "one")
    leases.release("one")
    assert not is_locked(tmp_path / "one")


def test_a_lease_that_is_released_while_it_waits_is_not_held(
    leases: Leases, waiting: threading.Semaphore, tmp_path: Path
) -> None:
    def take() -> None:
        leases.take("one", tmp_path / "one", lambda: None)

    with locked(tmp_path / "one"):
        released = begun(take)
        assert waiting.acquire(timeout=BOUND_SECONDS)
        assert ended(begun(lambda: leases.release("one")))
        assert ended(released)
        while waiting.acquire(blocking=False):
            pass
        again = begun(take)
        assert waiting.acquire(timeout=BOUND_SECONDS)
        assert ended(begun(lambda: leases.release("one")))
        assert ended(again)
    assert not is_locked(tmp_path / "one")
    take()
    assert is_locked(tmp_path / "one")
