"""Tests that blocking calls leave the event loop alone, and end before a cancelled task continues."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import anyio
import pytest

from provisioner.base.errors import Interrupted, UsageError
from provisioner.base.progress import Silence
from provisioner.inspect import blocking
from provisioner.inspect.blocking import (
    LAUNCHES_AT_ONCE,
    PREPARATIONS_AT_ONCE,
    Listener,
    call,
    check,
    end,
    launch,
    prepare,
    reporting,
)
from tests.unit.fakes.clock import WaitingClock
from tests.waiting import BOUND_SECONDS, until, until_in_loop

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_a_result_and_an_error_come_as_they_are() -> None:
    def fail() -> None:
        raise UsageError("no")

    assert await call(lambda: 3) == 3
    with pytest.raises(UsageError):
        await call(fail)


async def test_a_cancelled_call_is_told_and_waited_for() -> None:
    seen: list[str] = []
    begun = threading.Event()
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await anyio.sleep(0)

    async def cancel(scope: anyio.CancelScope) -> None:
        await until_in_loop(begun.is_set)
        scope.cancel()

    def work() -> None:
        begun.set()
        try:
            until(check)  # which raises an error
        except Interrupted:
            before = turns
            until(lambda: turns > before + 100)  # time enough for a loop that does not wait
            seen.append("cleared away")
            raise

    async with anyio.create_task_group() as group:
        group.start_soon(count_turns)
        with anyio.CancelScope() as scope:
            group.start_soon(cancel, scope)
            await call(work)
        assert scope.cancelled_caught
        assert seen == ["cleared away"]
        group.cancel_scope.cancel()


async def test_a_cancelled_call_that_succeeds_stays_cancelled() -> None:
    begun, cancelled = threading.Event(), threading.Event()
    with anyio.CancelScope() as scope:

        def work() -> None:
            begun.set()
            until(cancelled.is_set)  # trio's scopes can be asked in their own thread alone

        async def cancel() -> None:
            await until_in_loop(begun.is_set)
            scope.cancel()
            cancelled.set()

        async with anyio.create_task_group() as group:
            group.start_soon(cancel)
            await call(work)
            pytest.fail("it went on")
    assert scope.cancelled_caught


async def test_the_event_loop_runs_while_many_calls_wait() -> None:
    waiting = threading.Barrier(61)

    async def tick() -> None:
        await until_in_loop(lambda: waiting.n_waiting == 60)
        waiting.wait()

    with anyio.fail_after(BOUND_SECONDS):
        async with anyio.create_task_group() as group:
            group.start_soon(tick)
            for _ in range(60):
                group.start_soon(call, lambda: waiting.wait(BOUND_SECONDS))


async def test_an_end_waits_for_no_launch() -> None:
    freed = threading.Event()
    begun: list[int] = []

    def wait() -> None:
        begun.append(1)
        freed.wait()

    async with anyio.create_task_group() as group:
        for _ in range(LAUNCHES_AT_ONCE + 1):
            group.start_soon(launch, wait)
        await until_in_loop(lambda: len(begun) == LAUNCHES_AT_ONCE)
        with anyio.fail_after(BOUND_SECONDS):
            await end(freed.set)


async def test_samples_that_start_together_are_prepared_a_few_at_a_time() -> None:
    freed, counting = threading.Event(), threading.Lock()
    at_work = most = 0

    def work() -> None:
        nonlocal at_work, most
        with counting:
            at_work += 1
            most = max(most, at_work)
        freed.wait()
        with counting:
            at_work -= 1

    async with anyio.create_task_group() as group:
        for _ in range(5 * PREPARATIONS_AT_ONCE):
            group.start_soon(prepare, work)
        try:
            await until_in_loop(lambda: at_work >= PREPARATIONS_AT_ONCE)
        finally:
            freed.set()
    assert (at_work, most) == (0, PREPARATIONS_AT_ONCE)


async def test_a_launch_that_was_not_cancelled_is_not_said_to_be() -> None:
    stop = threading.Event()
    await launch(lambda: None, stop)
    assert not stop.is_set()


def test_notes_are_shown_and_phases_only_at_info(caplog: pytest.LogCaptureFixture) -> None:
    listener = Listener("task \x1b]0;1")
    with caplog.at_level(logging.INFO, "provisioner.inspect"):
        listener.note("Waiting\x1b]2;until others have ended.")
        listener.phase_started("boot")
        listener.phase_finished("boot", 1.25)
    shown = [(record.levelno, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in shown] == [logging.WARNING, logging.INFO]
    assert ": Waiting" in shown[0][1]
    assert shown[1][1].endswith("1: boot took 1.2 s")
    assert "\x1b" not in "".join(text for _, text in shown)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Has work said often; a thread that still ends would say the next test's."""
    monkeypatch.setattr(blocking, "EVERY_SECONDS", 0.1)
    yield
    until(lambda: "heartbeat" not in {thread.name for thread in threading.enumerate()})


def _shown(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_long_work_says_what_it_is_at_and_how_long_it_took(
    caplog: pytest.LogCaptureFixture,
) -> None:
    work = Listener("eval 7")
    with reporting(work, "its machines are up"):
        work.phase_started("boot")
        until(lambda: sum(text.endswith("; now: boot") for text in _shown(caplog)) >= 2)
        work.phase_started("isolation")
        until(lambda: _shown(caplog)[-1].endswith("; now: isolation"))
    assert all(text.startswith("eval 7: ") for text in _shown(caplog))
    assert any(text.startswith("eval 7: its machines are up after ") for text in _shown(caplog))


def test_many_samples_share_a_line(caplog: pytest.LogCaptureFixture) -> None:
    listeners = [Listener(f"eval {number}") for number in range(3)]
    listeners[0].note("Building the image of x" + "x" * 500)
    with reporting(listeners[0], "up"), reporting(listeners[1], "up"), reporting(listeners[2], "up"):
        for work in listeners[1:]:
            work.phase_started("boot")
        until(lambda: any(text.startswith("3 samples at work") and "boot (2), " in text for text in _shown(caplog)))
        assert len(_shown(caplog)[-1]) < 300


def test_short_work_and_work_that_fails_say_nothing_of_their_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocking, "EVERY_SECONDS", BOUND_SECONDS)
    monkeypatch.setattr(blocking, "time", clock := WaitingClock())

    def fail_late() -> None:
        clock.seconds += 2 * BOUND_SECONDS
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"), reporting(Listener("fails"), "done"):
        fail_late()
    with reporting(Listener("short"), "done"), reporting(Silence(), "done"):
        pass
    assert _shown(caplog) == []


def test_a_build_that_has_been_told_says_that_it_is_done(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocking, "EVERY_SECONDS", BOUND_SECONDS)
    monkeypatch.setattr(blocking, "time", WaitingClock())
    with reporting(work := Listener("startup"), "its images are ready"):
        work.note("Building the image of machine box")
    assert _shown(caplog)[-1] == "startup: its images are ready after 0 s"


def test_the_thread_ends_with_the_work() -> None:
    with reporting(Listener("eval"), "done"):
        assert "heartbeat" in {thread.name for thread in threading.enumerate()}
    until(lambda: "heartbeat" not in {thread.name for thread in threading.enumerate()})
