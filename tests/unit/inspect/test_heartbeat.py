"""Tests that long work says what it is at and how long it took, and short work nothing."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from provisioner.inspect import listener
from provisioner.inspect.listener import Listener, told
from provisioner.progress import Silence
from tests.unit.fakes.clock import WaitingClock
from tests.waiting import BOUND_SECONDS, until


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Has work said often; a thread that still ends would say the next test's."""
    monkeypatch.setattr(listener, "EVERY_SECONDS", 0.1)
    yield
    until(lambda: "heartbeat" not in {thread.name for thread in threading.enumerate()})


def _shown(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_long_work_says_what_it_is_at_and_how_long_it_took(
    caplog: pytest.LogCaptureFixture,
) -> None:
    work = Listener("eval 7")
    with told(work, "its machines are up"):
        work.phase_started("boot")
        until(lambda: sum(text.endswith("; now: boot") for text in _shown(caplog)) >= 2)
        work.phase_started("isolation")
        until(lambda: _shown(caplog)[-1].endswith("; now: isolation"))
    assert all(text.startswith("eval 7: ") for text in _shown(caplog))
    assert any(text.startswith("eval 7: its machines are up after ") for text in _shown(caplog))


def test_many_samples_share_a_line(caplog: pytest.LogCaptureFixture) -> None:
    listeners = [Listener(f"eval {number}") for number in range(3)]
    listeners[0].note("Building the image of x" + "x" * 500)
    with told(listeners[0], "up"), told(listeners[1], "up"), told(listeners[2], "up"):
        for work in listeners[1:]:
            work.phase_started("boot")
        until(lambda: any(text.startswith("3 samples at work") and "boot (2), " in text for text in _shown(caplog)))
        assert len(_shown(caplog)[-1]) < 300


def test_short_work_and_work_that_fails_say_nothing_of_their_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "EVERY_SECONDS", BOUND_SECONDS)
    monkeypatch.setattr(listener, "time", clock := WaitingClock())

    def fail_late() -> None:
        clock.seconds += 2 * BOUND_SECONDS
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"), told(Listener("fails"), "done"):
        fail_late()
    with told(Listener("short"), "done"), told(Silence(), "done"):
        pass
    assert _shown(caplog) == []


def test_a_build_that_has_been_told_says_that_it_is_done(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "EVERY_SECONDS", BOUND_SECONDS)
    monkeypatch.setattr(listener, "time", WaitingClock())
    with told(work := Listener("startup"), "its images are ready"):
        work.note("Building the image of machine box")
    assert _shown(caplog)[-1] == "startup: its images are ready after 0 s"


def test_the_thread_ends_with_the_work() -> None:
    with told(Listener("eval"), "done"):
        assert "heartbeat" in {thread.name for thread in threading.enumerate()}
    until(lambda: "heartbeat" not in {thread.name for thread in threading.enumerate()})
