"""Tests that blocking calls leave the event loop alone, and end before a cancelled task continues."""

from __future__ import annotations

import logging
import threading

import anyio
import pytest

from provisioner.base.errors import Interrupted, UsageError
from provisioner.base.progress import Silence
from provisioner.inspect import blocking
from provisioner.inspect.blocking import (
    LAUNCHES_AT_ONCE,
    LONG_SECONDS,
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


@pytest.mark.parametrize(
    ("seconds", "level"), [(2 * LONG_SECONDS, logging.WARNING), (1.0, logging.INFO)], ids=["long", "short"]
)
def test_the_end_of_long_work_is_shown(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, seconds: float, level: int
) -> None:
    monkeypatch.setattr(blocking, "time", clock := WaitingClock())
    with (
        caplog.at_level(logging.INFO, "provisioner.inspect"),
        reporting(Listener("eval 7"), "its machines are up"),
        reporting(Silence(), "done"),
    ):
        clock.seconds += seconds
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (level, f"eval 7: its machines are up after {seconds:.0f} s")
    ]


def test_work_that_fails_says_nothing_of_its_end(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, "provisioner.inspect"),
        pytest.raises(ValueError, match="no"),
        reporting(Listener("fails"), "done"),
    ):
        raise ValueError("no")
    assert caplog.records == []
