"""Tests that two provisioners take turns with one environment."""

from __future__ import annotations

import threading

import pytest

from provisioner.errors import UsageError
from provisioner.machines.locking import creation_lock, destruction_lock, environment_lock
from provisioner.session import Session
from provisioner.store.locks import is_locked
from tests.unit.fakes.clock import WaitingClock
from tests.unit.fakes.world import environment, told_of
from tests.waiting import BOUND_SECONDS


def test_the_lock_is_released_at_the_end(session: Session) -> None:
    lock = session.environments.lock("env")
    with environment_lock(session, session.environments.save(environment())):
        assert is_locked(lock)
    assert not is_locked(lock)


def test_a_destroyed_environment_cannot_be_changed(session: Session) -> None:
    saved = session.environments.save(environment())
    session.environments.archive(saved)
    with pytest.raises(UsageError, match="env has been destroyed"), environment_lock(session, saved):
        raise AssertionError


@pytest.mark.parametrize("status", ["destroying", "unverified"])
def test_an_environment_that_is_ending_can_only_be_destroyed(session: Session, status: str) -> None:
    saved = session.environments.save(environment())
    ending = session.environments.update(saved, status=status)
    with pytest.raises(UsageError, match="The destruction of env has begun"), environment_lock(session, saved):
        raise AssertionError
    with destruction_lock(session, saved) as current:
        assert current == ending


def test_an_environment_is_locked_before_it_has_a_record(session: Session) -> None:
    with creation_lock(session, environment()):
        assert is_locked(session.environments.lock("env"))
    assert not is_locked(session.environments.lock("env"))


def test_a_waiting_provisioner_sees_the_other_ones_changes(session: Session) -> None:
    saved = session.environments.save(environment())
    has_lock, waits, seen = threading.Event(), threading.Event(), []

    def other() -> None:
        with environment_lock(session, saved):
            has_lock.set()
            assert waits.wait(BOUND_SECONDS)
            session.environments.update(saved, status="ready")

    told_of(session).notes = Signalling(waits)
    thread = threading.Thread(target=other)
    thread.start()
    assert has_lock.wait(BOUND_SECONDS)
    with environment_lock(session, saved) as current:
        seen.append(current.status)
    thread.join()
    assert seen == ["ready"]
    assert told_of(session).notes == ["Waiting for another provisioner that works on env"]


def test_a_destruction_needs_neither_lock_file_nor_record(session: Session) -> None:
    saved = session.environments.save(environment())
    (session.environments.directory("env") / "environment.json").write_text("{")
    session.environments.lock("env").mkdir(parents=True)
    with destruction_lock(session, saved) as current:
        assert current == saved
    [note] = told_of(session).notes
    assert note.startswith("Locking env: IsADirectoryError")


def test_a_destruction_waits_for_others_and_sees_their_changes(session: Session) -> None:
    saved = session.environments.save(environment())
    session.environments.update(saved, status="ready")
    with destruction_lock(session, saved) as current:
        assert current.status == "ready"
        assert is_locked(session.environments.lock("env"))


def test_a_destruction_does_not_wait_forever(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("provisioner.store.locks.time", WaitingClock())
    saved = session.environments.save(environment())
    with environment_lock(session, saved), destruction_lock(session, saved) as current:
        assert current == saved
    waits, goes_on = told_of(session).notes
    assert waits == "Waiting for another provisioner that works on env"
    assert goes_on == "Locking env: TimeoutError another process still holds it after 60 seconds"


class Signalling(list[str]):
    """Signals an event when something is appended."""

    def __init__(self, event: threading.Event) -> None:
        super().__init__()
        self._event = event

    def append(self, text: str) -> None:
        super().append(text)
        self._event.set()
