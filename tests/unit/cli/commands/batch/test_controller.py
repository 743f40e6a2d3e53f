"""What a controller bears of its database and disk, and which runs it begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from provisioner.base.clock import now
from provisioner.base.config import Settings
from provisioner.base.errors import InfrastructureError, Interrupted, LivenessLostError
from provisioner.batch.context import BatchContext
from provisioner.batch.live_status import ActiveRun
from provisioner.batch.records import Batch, Batches
from provisioner.batch.steps import Costs, EndStep, Failure, UpStep
from provisioner.cli.commands.batch import controller
from provisioner.cli.commands.batch.controller import OutageTolerance, run_batch
from provisioner.cli.commands.batch.view import BatchView
from provisioner.store.home import Home
from tests.unit.batch import samples
from tests.unit.batch.samples import run
from tests.unit.fakes.world import environment
from tests.waiting import BOUND_SECONDS


def test_an_outage_is_noted_once_and_tolerated_until_it_ends() -> None:
    notes: list[str] = []
    outage = OutageTolerance(notes.append)
    for _ in range(3):
        with outage.tolerated():
            raise InfrastructureError("It restarts.")
    assert len(notes) == 1
    with outage.tolerated():
        pass
    with outage.tolerated():
        raise OSError("disk full")
    assert len(notes) == 2


def test_an_outage_that_lasts_too_long_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "OUTAGE_SECONDS", -1.0)
    outage = OutageTolerance(lambda _: None)
    with outage.tolerated():
        raise OSError("disk full")
    with pytest.raises(OSError, match="disk full"), outage.tolerated():
        raise OSError("disk full")


def test_a_worker_that_others_consider_dead_stops_at_once() -> None:
    with pytest.raises(LivenessLostError), OutageTolerance(lambda _: None).tolerated():
        raise LivenessLostError("Others consider this worker dead.")


class Attempt:
    """An attempt that ends only once it is told to stop, or whose task is broken."""

    id = "env"

    def __init__(self, active_run: ActiveRun, *, broken: bool) -> None:
        self.active_run, self.broken = active_run, broken

    def up(self) -> UpStep:
        if not self.broken:
            assert self.active_run.stop.wait(BOUND_SECONDS)
            raise Interrupted("It was told to stop.")
        failure = Failure(outcome="task_failed", message="It is broken.")
        return UpStep(at=now(), begun_at=now(), environment=self.id, cloud="moon", region="", failure=failure)

    def end(self, **_: bool) -> EndStep:
        return EndStep(at=now())

    def costs(self, _environments: list[str]) -> Costs:
        return Costs(at=now())


@pytest.fixture
def two(tmp_path: Path) -> tuple[Batch, BatchContext]:
    """A batch of two runs, which nothing works on yet."""
    (tmp_path / "fam").mkdir()
    home = Home(tmp_path / "home")
    home.make()
    runs = [run(repetition=number, family=str(tmp_path / "fam")) for number in (1, 2)]
    batch = samples.batch(*runs, suite_file=str(tmp_path / "suite.yaml"))
    Batches(home).save(batch)
    return batch, BatchContext(home, Settings(), batch.suite, tmp_path, batch.id)


def test_what_was_cancelled_before_it_was_queued_is_not_run(
    two: tuple[Batch, BatchContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, context = two
    batches, broken = Batches(context.session.home), False
    batches.note_cancelled(batch, [run.key for run in batch.runs])

    def new_attempt(*arguments: Any) -> Attempt:
        return Attempt(arguments[5], broken=broken)

    monkeypatch.setattr(context, "new_attempt", new_attempt)
    assert run_batch(batch, context).exit_code == Interrupted.exit_code
    assert [row.outcome for row in batches.results(batch)] == ["cancelled", "cancelled"]
    broken = True
    run_batch(batch, context, resumed=True)
    assert [row.outcome for row in batches.results(batch)] == ["task_failed", "task_failed"]


@pytest.mark.parametrize("error", [KeyboardInterrupt("SIGINT"), InfrastructureError("It broke.")], ids=repr)
def test_what_an_earlier_attempt_left_is_named(
    two: tuple[Batch, BatchContext],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
) -> None:
    batch, context = two

    class Failing(BatchView):
        def show(self, *_: Any) -> None:
            raise error

    for identity, name in (("left", batch.id), ("others", "b-2")):
        context.session.environments.save(environment(identity, batch=name))
    monkeypatch.setattr(context, "new_attempt", lambda *given: Attempt(given[5], broken=False))
    monkeypatch.setattr(controller, "OUTAGE_SECONDS", 0.0)
    monkeypatch.setattr(controller, "BatchView", Failing)
    with pytest.raises((Interrupted, InfrastructureError)) as raised:
        run_batch(batch, context)
    said = f"{raised.value.message} {capsys.readouterr().err}"
    assert "not everything could be removed: left is not confirmed to be gone" in said.lower()
    assert "others" not in said


def test_a_damaged_note_of_cancellations_keeps_no_run_alive(
    two: tuple[Batch, BatchContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, context = two
    attempts: list[Attempt] = []

    def new_attempt(*arguments: Any) -> Attempt:
        attempts.append(Attempt(arguments[5], broken=False))
        (Batches(context.session.home).directory(batch.id) / "cancelled.json").write_text("[")
        return attempts[-1]

    monkeypatch.setattr(context, "new_attempt", new_attempt)
    monkeypatch.setattr(controller, "OUTAGE_SECONDS", 0.0)
    with pytest.raises(InfrastructureError, match="The note of what was cancelled"):
        run_batch(batch, context)
    assert attempts
    assert all(attempt.active_run.stop.is_set() for attempt in attempts)
