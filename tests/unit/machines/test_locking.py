"""Two provisioners that want one environment take turns."""

from __future__ import annotations

import threading

from provisioner.machines.locking import environment_lock
from provisioner.session import Session
from provisioner.store.locks import is_locked
from tests.unit.fakes.world import environment, told_of


def test_the_lock_is_free_again_however_it_ends(session: Session) -> None:
    lock = session.environments.lock("env")
    with environment_lock(session, environment()):
        assert is_locked(lock)
    assert not is_locked(lock)


def test_an_environment_without_a_record_is_given_as_it_is(session: Session) -> None:
    new = environment()
    with environment_lock(session, new) as known:
        assert known is new


def test_who_had_to_wait_is_told_and_sees_what_the_other_has_changed(session: Session) -> None:
    known = session.environments.save(environment())
    has_lock, waits, seen = threading.Event(), threading.Event(), []

    def other() -> None:
        with environment_lock(session, known):
            has_lock.set()
            assert waits.wait(30)
            session.environments.update(known, status="ready")

    told_of(session).notes = Signalling(waits)
    thread = threading.Thread(target=other)
    thread.start()
    assert has_lock.wait(30)
    with environment_lock(session, known) as now_known:
        seen.append(now_known.status)
    thread.join()
    assert seen == ["ready"]
    assert told_of(session).notes == ["Waiting for another provisioner that works on env"]


class Signalling(list[str]):
    """A list that says when something is added."""

    def __init__(self, event: threading.Event) -> None:
        super().__init__()
        self._event = event

    def append(self, text: str) -> None:
        super().append(text)
        self._event.set()
