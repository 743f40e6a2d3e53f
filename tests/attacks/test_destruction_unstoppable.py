"""A machine, a full disk or a broken listener makes something fail between a failure and the destruction.

Whatever fails there, and however: the machines are destroyed, the reservation is settled or its record stays and says
that it is not, and the operator is told.
"""

from __future__ import annotations

import errno
import itertools
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from provisioner.base.config import Settings
from provisioner.base.errors import (
    DamagedRecordError,
    InfrastructureError,
    ProvisionerError,
    StillThereError,
    TaskError,
)
from provisioner.base.models import Environment
from provisioner.clouds.local import machine
from provisioner.clouds.local.cloud import LocalCloud
from provisioner.environment import lifecycle, run, sweep
from provisioner.environment.selection import destroy_damaged
from provisioner.family.loader import TaskFamily
from provisioner.machines import claims, destroy
from provisioner.session import Session
from provisioner.store.environments import EnvironmentStore
from provisioner.store.files import locked
from provisioner.store.home import Home
from tests.unit.conftest import CommandLine
from tests.unit.fakes.clock import WaitingClock
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.guest import Fails
from tests.unit.fakes.world import Told, created, environment, told_of, up
from tests.waiting import BOUND_SECONDS

ERRORS: dict[str, Callable[[], BaseException]] = {
    "memory": MemoryError,
    "recursion": RecursionError,
    "disk": lambda: OSError(errno.ENOSPC, "No space left on device"),
    "pipe": BrokenPipeError,
    "encoding": lambda: UnicodeEncodeError("ascii", "é", 0, 1, "ordinal not in range"),
    "type": TypeError,
    "exit": lambda: SystemExit(1),
}
# Every step between a failure and the destruction, and those of the destruction that are not the cloud's own.
STEPS = {
    "console": "tests.unit.fakes.cloud.FakeCloud.console",
    "terraform-log": "provisioner.terraform.stack.Stack.log_text",
    "redaction": "provisioner.base.redaction.Redactor.redact",
    "log-file": "provisioner.machines.recordings.write_atomically",
    "logs": "provisioner.machines.destroy.keep_logs",
    "teardown": "provisioner.environment.operations.teardown",
    "login": "provisioner.environment.lifecycle.connect",
    "record-read": "provisioner.store.environments.EnvironmentStore.reread",
    "terraform": "provisioner.terraform.stack.Stack.remove",
    "alive": "tests.unit.fakes.cloud.FakeCloud.alive",
    "stack-files": "provisioner.terraform.stack.Stack.forget",
    "lease": "provisioner.store.files.Leases.release",
}
# Those after which a record stays, so that the same command tries again: the machines are gone all the same.
LATE_STEPS = {
    "record-write": "provisioner.store.environments.write_atomically",
    "settlement": "provisioner.machines.claims.settle",
    "archive": "provisioner.store.environments.EnvironmentStore.archive",
}


def cases(steps: Mapping[str, str]) -> list[Any]:
    """Each step with the lack of memory and with another error, all of which occur."""
    others = itertools.cycle(name for name in ERRORS if name != "memory")
    pairs = [(step, error) for step in steps for error in ("memory", next(others))]
    return [pytest.param(steps[step], ERRORS[error], id=f"{step}-{error}") for step, error in pairs]


class Broken(Told):
    """A listener whose every call fails, such as output into a closed pipe."""

    def __init__(self, error: Callable[[], BaseException]) -> None:
        super().__init__()
        self.error = error

    def _fail(self, *_: object) -> None:
        raise self.error()

    phase_started = phase_finished = note = output = _fail  # type: ignore[assignment]


@pytest.fixture
def session(session: Session) -> Iterator[Session]:
    """The session, whose leases are given up even if the test prevents that."""
    yield session
    for name in list(session.leases._held):
        _, lock = session.leases._held.pop(name)
        lock.close()


def breaks(monkeypatch: pytest.MonkeyPatch, path: str, error: Callable[[], BaseException]) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error()

    monkeypatch.setattr(path, fail)


def running(session: Session) -> Environment:
    """An environment that has a reservation, a lease, a teardown, and has started."""
    return up(session, claims.reserve(session, environment(has_teardown=True)))


def unsettled(session: Session) -> list[str]:
    return [entry.environment for entry in session.ledger.entries(unsettled=True)]


@pytest.mark.parametrize(("step", "error"), cases(STEPS))
def test_nothing_prevents_a_destruction(
    session: Session, cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch, step: str, error: Callable[[], BaseException]
) -> None:
    env = running(session)
    with monkeypatch.context() as patch:
        breaks(patch, step, error)
        lifecycle.destroy(session, env)
    assert cloud.existing() == []
    assert unsettled(session) == []
    assert not session.environments.directory("env").exists()


@pytest.mark.parametrize(("step", "error"), cases(LATE_STEPS))
def test_machines_go_before_records(
    session: Session, cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch, step: str, error: Callable[[], BaseException]
) -> None:
    env = running(session)
    said = []
    with monkeypatch.context() as patch:
        breaks(patch, step, error)
        try:
            lifecycle.destroy(session, env)
        except (ProvisionerError, SystemExit) as told:
            said.append(str(told))
    assert cloud.existing() == []
    assert said in ([], ["1"]) or "env is gone, but its" in said[0]
    # The same command puts the rest away.
    lifecycle.destroy(session, env)
    assert unsettled(session) == []
    assert not session.environments.directory("env").exists()


def test_a_process_stopped_within_a_change_prevents_no_destruction(
    session: Session, cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = running(session)
    monkeypatch.setattr("provisioner.store.files.time", WaitingClock())
    with locked(session.environments.directory("env") / "environment.lock"):
        lifecycle.destroy(session, env)
    assert cloud.existing() == []
    assert not session.environments.directory("env").exists()


@pytest.mark.parametrize(("step", "error"), cases({name: STEPS[name] for name in ("console", "logs", "terraform")}))
def test_nothing_prevents_the_destruction_after_a_failed_start(
    session: Session,
    cloud: FakeCloud,
    fam: TaskFamily,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    error: Callable[[], BaseException],
) -> None:
    cloud.guest_defaults = {"values": {"start": Fails("no flag")}}

    def clear_away(*arguments: Any) -> None:
        with monkeypatch.context() as patch:
            breaks(patch, step, error)
            destroy.clear_away(*arguments)

    monkeypatch.setattr("provisioner.environment.lifecycle.clear_away", clear_away)
    with pytest.raises(TaskError, match="no flag"):
        lifecycle.up(session, fam, "main")
    assert cloud.existing() == []
    assert unsettled(session) == []


@pytest.mark.parametrize("error", [BrokenPipeError, ValueError, MemoryError])
def test_a_broken_listener_does_not_prevent_the_destruction(
    session: Session, cloud: FakeCloud, error: Callable[[], BaseException]
) -> None:
    env = running(session)
    cloud.terraform_fails("destroy")  # so that there is something to tell
    lifecycle.destroy(replace(session, progress=Broken(error), leases=session.leases), env)
    assert cloud.existing() == []
    assert not session.environments.directory("env").exists()


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Ends what is left behind, before what the test has changed is as before."""
    release = threading.Event()
    yield release
    release.set()
    for thread in threading.enumerate():
        if thread.name in ("teardown", "Keeping the logs of env"):
            thread.join(BOUND_SECONDS)


def test_a_teardown_that_never_ends_is_left_behind(
    session: Session, cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch, release: threading.Event
) -> None:
    env = running(session)
    monkeypatch.setattr("provisioner.environment.lifecycle.TEARDOWN_GRACE_SECONDS", -119.8)
    monkeypatch.setattr("provisioner.environment.operations.teardown", lambda *_: release.wait(BOUND_SECONDS))
    lifecycle.destroy(session, env)
    assert cloud.existing() == []
    assert any("teardown: TimeoutError" in note for note in told_of(session).notes)


def test_a_console_that_never_ends_is_left_behind(
    session: Session, cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch, release: threading.Event
) -> None:
    env = running(session)
    monkeypatch.setattr("provisioner.machines.destroy.LOGS_SECONDS", 0.2)
    monkeypatch.setattr(cloud, "console", lambda *_: str(release.wait(BOUND_SECONDS)))
    lifecycle.destroy(session, env)
    assert cloud.existing() == []
    assert any("Keeping the logs of env: TimeoutError" in note for note in told_of(session).notes)


@pytest.mark.parametrize(
    "error",
    [sqlite3.OperationalError("database is locked"), InfrastructureError("The ledger does not answer."), MemoryError()],
    ids=["locked", "gone", "memory"],
)
def test_a_ledger_that_fails_leaves_the_record_and_says_so(
    session: Session, cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    env = running(session)
    with monkeypatch.context() as patch:

        def fail(*_: Any, **__: Any) -> Any:
            raise error

        patch.setattr("provisioner.costs.ledger.Ledger.settle", fail)
        with pytest.raises(InfrastructureError, match="env is gone, but its reservation is not settled") as told:
            lifecycle.destroy(session, env)
    assert told.value.hint == "provisioner destroy env tries that again."
    assert cloud.existing() == []
    assert unsettled(session) == ["env"]
    lifecycle.destroy(session, env)
    assert unsettled(session) == []


DAMAGED: dict[str, Callable[[str], str]] = {
    "truncated": lambda text: text[:100],
    "empty": lambda _: "",
    "huge": lambda text: text + " " * (65 << 20),
    "deep": lambda _: "[" * 100_000,
    "foreign-id": lambda text: text.replace('"id": "env"', '"id": "other"'),
    "naive-time": lambda text: text.replace('Z"', '"'),
    "binary": lambda _: "\0\ud800".encode("utf-8", "surrogatepass").decode("latin-1"),
}


@pytest.mark.parametrize("by_id", [False, True], ids=["in-memory", "by-id"])
@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_record_prevents_no_destruction(
    session: Session, cloud: FakeCloud, damage: Callable[[str], str], by_id: bool
) -> None:
    env = running(session)
    [other] = created(session, environment("other"))
    path: Path = session.environments.directory("env") / "environment.json"
    path.write_text(damage(path.read_text()))
    assert [record.id for record in session.environments.readable()] == ["other"]
    assert list(session.environments.unreadable()) == ["env"]
    with pytest.raises(DamagedRecordError, match="cannot be read"):
        session.environments.find("env")
    sweep.sweep(session, lambda _: session, None)  # removes `other`, which no command attends, and leaves `env` alone
    assert cloud.existing() == ["env/primary"]
    lifecycle.destroy(session, other)
    session.leases.release("env")
    if by_id:
        destroy_damaged(session, "env")
    else:
        lifecycle.destroy(session, env)
    assert cloud.existing() == []
    assert unsettled(session) == []


def test_a_run_on_a_full_disk_leaves_no_machine(
    session: Session, cloud: FakeCloud, fam: TaskFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    def score(*_: Any, **__: Any) -> Any:
        for module in ("store.environments", "machines.logs", "terraform.stack"):
            monkeypatch.setattr(f"provisioner.{module}.write_atomically", full)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run, "score", score)
    with pytest.raises((OSError, InfrastructureError)):
        run.run(session, fam, "main", submission="1")
    assert cloud.existing() == []


def test_a_machine_that_does_not_end_keeps_no_other_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []

    def end(directory: Path) -> None:
        ended.append(directory.name)
        if directory.name == "primary":
            raise machine.MachineError("process 7 does not end")

    monkeypatch.setattr(machine, "destroy", end)
    with pytest.raises(StillThereError, match="process 7 does not end"):
        LocalCloud(Home(tmp_path), Settings()).remove(environment(roles=("primary", "aux")))
    assert sorted(ended) == ["aux", "primary"]


def test_destroy_continues_with_the_next_environment(provisioner: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    store = EnvironmentStore(Home(provisioner.home))
    for name in ("one", "two"):
        store.save(environment(name))
    ended = []

    def destroy_one(_: Session, env: Environment) -> None:
        ended.append(env.id)
        if env.id == "one":
            raise MemoryError

    monkeypatch.setattr(lifecycle, "destroy", destroy_one)
    done = provisioner("destroy", "--all", "--json")
    assert sorted(ended) == ["one", "two"]
    assert (done.code, done.json["destroyed"]) == (1, ["two"])
    assert done.json["failed"] == [{"environment": "one", "message": "Unexpected MemoryError"}]
