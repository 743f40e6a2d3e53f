"""Tests that samples which do not fit the budget wait for the others, and keep none of them out."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal

import anyio
import pytest

from provisioner.base.config import Settings
from provisioner.base.errors import BudgetError, ShortageError
from provisioner.inspect import blocking, forks, sample
from provisioner.inspect.configuration import Configuration, Machine
from provisioner.inspect.evals import Origin
from provisioner.inspect.sample import SampleMachines
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.inspect.conftest import Configured
from tests.waiting import BOUND_SECONDS, until_in_loop

pytestmark = pytest.mark.anyio


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> list[SampleMachines]:
    """The samples that were refused for want of a budget, in order, each time."""
    refused: list[SampleMachines] = []
    forks = SampleMachines.bring_up

    def noted(machines: SampleMachines) -> None:
        try:
            forks(machines)
        except BudgetError:
            refused.append(machines)
            raise

    monkeypatch.setattr(SampleMachines, "bring_up", noted)
    return refused


@pytest.fixture
def paid(configured: Configured, cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch) -> Configured:
    """Makes configurations whose samples reserve 8 dollars and a bit, for four hours and the teardown."""
    cloud.usd = Decimal(1)
    monkeypatch.setattr(forks, "PAUSE_SECONDS", 0.05)
    return configured


async def _sample(paid: Configured, name: str, budget: float) -> SampleMachines:
    configuration = paid(budget=budget)
    return await blocking.end(lambda: SampleMachines(configuration, Origin("task", "eval", name)))


async def test_samples_that_wait_for_budget_let_others_finish(
    paid: Configured, refused: list[SampleMachines], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocking, "LAUNCHES_AT_ONCE", 2)
    first = await _sample(paid, "first", budget=10)
    with anyio.fail_after(BOUND_SECONDS):
        await forks.bring_up(first)
    up: list[SampleMachines] = []

    async def come_and_go(name: str) -> None:
        waiting = await _sample(paid, name, budget=10)
        await forks.bring_up(waiting)
        up.append(waiting)
        await blocking.end(waiting.destroy)

    with anyio.fail_after(BOUND_SECONDS):
        async with anyio.create_task_group() as group:
            for name in ("second", "third", "fourth"):
                group.start_soon(come_and_go, name)
            await until_in_loop(lambda: len({id(machines) for machines in refused}) == 3)
            assert up == []
            _, outcome = await blocking.score(lambda: first.score("42"))
            assert outcome.score == 0.5
            assert await blocking.launch(lambda: "other launches run") == "other launches run"
            await blocking.end(first.destroy)
    assert len(up) == 3
    assert first.session.ledger.entries(unsettled=True) == []


async def test_a_sample_that_never_fits_does_not_wait(paid: Configured) -> None:
    first = await _sample(paid, "first", budget=10)
    await forks.bring_up(first)
    never = await _sample(paid, "never", budget=1)
    with anyio.fail_after(BOUND_SECONDS), pytest.raises(BudgetError):
        await forks.bring_up(never)
    await blocking.end(first.destroy)


async def test_a_refused_sample_is_retried_after_the_last_other(
    paid: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = [await _sample(paid, name, budget=10) for name in ("first", "second")]
    await forks.bring_up(first)
    refused = second.bring_up

    def end_the_other_after() -> None:
        try:
            refused()
        except BudgetError:
            first.destroy()
            raise

    monkeypatch.setattr(second, "bring_up", end_the_other_after)
    with anyio.fail_after(BOUND_SECONDS):
        await forks.bring_up(second)
    await blocking.end(second.destroy)


async def test_a_sample_that_waits_can_be_cancelled(paid: Configured, refused: list[SampleMachines]) -> None:
    first, second = [await _sample(paid, name, budget=10) for name in ("first", "second")]
    await forks.bring_up(first)
    ended = False
    async with anyio.create_task_group() as group:

        async def wait() -> None:
            nonlocal ended
            await forks.bring_up(second)
            ended = True

        group.start_soon(wait)
        await until_in_loop(lambda: second in refused)
        group.cancel_scope.cancel()
    assert not ended
    await blocking.end(first.destroy)
    assert first.session.environments.all() == []


async def test_samples_that_do_not_fit_into_memory_wait_for_each_other(
    cloud: FakeCloud, configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All start at once, when none has taken its memory yet."""
    monkeypatch.setattr(forks, "PAUSE_SECONDS", 0.05)

    def shortage(sizes: Mapping[str, object], count: int) -> str:
        return "no room" if len(cloud.existing()) + len(sizes) * count > 2 else ""

    monkeypatch.setattr(cloud, "shortage", shortage)
    most = [0]
    done: list[str] = []

    async def come_and_go(name: str) -> None:
        configuration = Configuration(machines=(Machine(name="a"), Machine(name="b")))
        machines = await blocking.end(lambda: SampleMachines(configuration, Origin("task", "eval", name)))
        await forks.bring_up(machines)
        most[0] = max(most[0], len(cloud.existing()))
        await blocking.end(machines.destroy)
        done.append(name)

    with anyio.fail_after(BOUND_SECONDS):
        async with anyio.create_task_group() as group:
            for name in ("first", "second", "third"):
                group.start_soon(come_and_go, name)
    assert len(done) == 3
    assert most == [2]


async def test_machines_that_never_fit_are_an_error(
    cloud: FakeCloud, configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cloud, "shortage", lambda *_: "no room")
    configuration = Configuration(machines=(Machine(name="a"), Machine(name="b")))
    machines = await blocking.end(lambda: SampleMachines(configuration, Origin("task", "eval", "alone")))
    with anyio.fail_after(BOUND_SECONDS), pytest.raises(ShortageError, match="no room"):
        await forks.bring_up(machines)


def test_a_sample_that_requires_kvm_has_a_cloud_that_emulates_none(
    configured: Configured, cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[bool] = []

    def shared_cloud(_home: object, settings: Settings, _where: object) -> FakeCloud:
        opened.append(settings.require_kvm)
        return cloud

    monkeypatch.setattr(sample, "shared_cloud", shared_cloud)
    for configuration in (configured(), configured(require_kvm=True)):
        sample.open_session(configuration, Origin(""))
    assert opened == [False, True]


def test_samples_that_begin_at_once_share_one_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly() -> Settings:
        time.sleep(0.1)
        return Settings()

    def slots() -> int:
        time.sleep(0.1)
        return 1

    monkeypatch.setattr(sample, "load_settings", slowly)
    monkeypatch.setattr(sample, "host_slots", slots)
    together = threading.Barrier(16)

    def begin(_: int) -> tuple[str | None, int]:
        together.wait(BOUND_SECONDS)
        return sample.process_spending(Decimal("12.3456")).command, id(sample.apply_batcher())

    monkeypatch.setattr(sample, "_SHARED", {})
    with ThreadPoolExecutor(16) as threads:
        made = set(threads.map(begin, range(16)))
    assert len(made) == 1


def test_threads_at_once_say_a_thing_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(deque[tuple[str, ...]]):
        def __contains__(self, words: object) -> bool:
            is_known = super().__contains__(words)
            time.sleep(0.05)
            return is_known

    monkeypatch.setattr(blocking, "SAID", Slow())
    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(lambda _: blocking.is_new("word"), range(8))) == 1


def test_what_was_said_is_remembered_up_to_a_bound() -> None:
    assert [blocking.is_new("first"), blocking.is_new("first")] == [True, False]
    for number in range(2000):
        blocking.is_new(str(number))
    assert len(blocking.SAID) == 1000
    assert blocking.is_new("first")
