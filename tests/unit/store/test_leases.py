"""Tests leases: a locked file on this controller, renewed in the cloud periodically."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from provisioner.errors import InfrastructureError
from provisioner.store import locks as module
from provisioner.store.locks import Leases, is_locked, locked
from tests.waiting import BOUND_SECONDS


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
