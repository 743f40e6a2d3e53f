"""Environments that start together share a stack; what fails does not take the others with it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from provisioner.base.config import Settings
from provisioner.base.errors import CapacityError, Interrupted, TerraformError
from provisioner.base.models import Environment
from provisioner.clouds.local.cloud import LocalCloud
from provisioner.machines import apply_batcher
from provisioner.machines.apply_batcher import MAX_PER_STACK, ApplyBatcher, terraform_slots
from provisioner.session import Session
from provisioner.store.environments import EnvironmentStore
from provisioner.store.home import Home
from tests.unit.fakes.world import environment
from tests.waiting import until

Create = Callable[[Session, list[Environment]], list[Environment]]


@pytest.fixture
def session(tmp_path: Path) -> Session:
    home = Home(tmp_path / "home")
    home.make()
    return Session(home=home, cloud=LocalCloud(home, Settings()))


def launched(
    session: Session, batcher: ApplyBatcher, count: int, create: Create, monkeypatch: pytest.MonkeyPatch
) -> list[Environment | Exception]:
    """Creates so many environments at the same time; returns each one's result or error.

    In place of a second's wait for further requests, all of them are waited for, or as many as a stack takes.
    """
    begun: set[str] = set()

    def are_gathered() -> bool:
        return len(batcher._waiting) >= MAX_PER_STACK or len(batcher._waiting) + len(begun) == count

    def begin(given: Session, environments: list[Environment]) -> list[Environment]:
        begun.update(environment.id for environment in environments)
        until(are_gathered)
        return create(given, environments)

    monkeypatch.setattr(apply_batcher, "time", SimpleNamespace(sleep=lambda _: until(are_gathered)))
    monkeypatch.setattr(apply_batcher, "create_machines", begin)

    def request(number: int) -> Environment | Exception:
        try:
            return batcher.create(session, session.environments.save(environment(f"env-{number}")))
        except Exception as error:
            return error
        finally:
            begun.add(f"env-{number}")

    with ThreadPoolExecutor(max_workers=count) as pool:
        return list(pool.map(request, range(count)))


@pytest.mark.parametrize(("cores", "gib", "slots"), [(2, 24, 4), (8, 4, 6), (1, 0.3, 1), (64, 512, 128)])
def test_terraforms_are_bounded_by_cores_and_memory(cores: int, gib: float, slots: int) -> None:
    assert terraform_slots(cores, gib) == slots


def test_a_crowd_takes_one_apply_up_to_a_bound(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    stacks: list[list[str]] = []
    at_once, most = 0, 0
    mutex = threading.Lock()

    def create(_: Session, environments: list[Environment]) -> list[Environment]:
        nonlocal at_once, most
        with mutex:
            stacks.append([environment.stack for environment in environments])
            at_once += 1
            most = max(most, at_once)
        until(lambda: at_once > 1 or sum(map(len, stacks)) > 2 * MAX_PER_STACK)  # the other slot has its turn
        with mutex:
            at_once -= 1
        return environments

    results = launched(session, ApplyBatcher("batch", slots=2), 3 * MAX_PER_STACK, create, monkeypatch)
    assert {result.id for result in results if isinstance(result, Environment)} == {
        f"env-{n}" for n in range(3 * MAX_PER_STACK)
    }
    assert all(len(set(names)) == 1 and len(names) <= MAX_PER_STACK for names in stacks)
    assert len({names[0] for names in stacks}) == len(stacks)
    assert len(stacks) < 8
    assert most <= 2
    # The record knows its stack before anything is created.
    assert session.environments.find("env-0").stack.startswith("batch-")


@pytest.mark.parametrize("kind", [TerraformError, CapacityError])
def test_one_that_cannot_be_created_fails_alone(
    session: Session, monkeypatch: pytest.MonkeyPatch, kind: type[TerraformError | CapacityError]
) -> None:
    asked: list[set[str]] = []

    def create(_: Session, environments: list[Environment]) -> list[Environment]:
        names = {environment.id for environment in environments}
        asked.append(names)
        if "env-1" in names:
            failed = kind("no")
            failed.environments = frozenset({"env-1"})
            raise failed
        return environments

    results = launched(session, ApplyBatcher("batch", slots=1), 3, create, monkeypatch)
    assert [type(result).__name__ for result in results] == ["Environment", kind.__name__, "Environment"]
    assert asked == [{"env-0", "env-1", "env-2"}, {"env-0", "env-2"}]


def test_one_whose_record_is_gone_fails_alone(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    update = EnvironmentStore.update

    def updated(store: EnvironmentStore, environment: Environment, **changes: str) -> Environment:
        if environment.id == "env-1":
            store.archive(environment)
        return update(store, environment, **changes)

    monkeypatch.setattr(EnvironmentStore, "update", updated)
    results = launched(session, ApplyBatcher("batch", slots=1), 3, lambda _, given: given, monkeypatch)
    assert [type(result).__name__ for result in results] == ["Environment", "UsageError", "Environment"]


def test_an_apply_whose_runs_have_all_stopped_is_interrupted(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()

    def create(given: Session, environments: list[Environment]) -> list[Environment]:
        begun.set()
        until(given.check)  # which raises an error
        return environments

    def check() -> None:
        if begun.is_set():
            raise Interrupted("stop")

    results = launched(replace(session, check=check), ApplyBatcher("batch", slots=1), 2, create, monkeypatch)
    assert all(isinstance(result, Interrupted) for result in results)
