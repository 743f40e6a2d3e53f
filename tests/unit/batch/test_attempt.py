"""How an attempt continues after a crash, and how it classifies errors. Only the cloud is a stand-in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import pytest

from provisioner.base import signals
from provisioner.base.clock import now
from provisioner.base.errors import (
    AgentError,
    BudgetError,
    Interrupted,
    MachineLostError,
    SubmissionError,
    TaskError,
    UsageError,
)
from provisioner.base.models import Endpoint, Environment, MachineRecord, MachineSize, ScoreLogEntry, TaskSetup
from provisioner.batch import attempt as module
from provisioner.batch.attempt import Attempt
from provisioner.batch.results import as_jsonl
from provisioner.batch.steps import Costs, Failure, Step, UpStep, interruption
from provisioner.batch.workflow import AttemptResult, build_row
from provisioner.clouds.cloud import EnvironmentResources, TerminationReason
from provisioner.costs.ledger import Ledger
from provisioner.environment import agent, lifecycle, planning
from provisioner.family.loader import load_family
from provisioner.machines import claims
from provisioner.machines.destroy import marked
from provisioner.machines.recordings import keep_logs, sealed
from provisioner.recording.published import check_results
from provisioner.session import Session
from provisioner.store.files import is_locked
from provisioner.store.home import Home
from tests.unit.batch.samples import entry, run, suite

RUN = run("solver")
SUITE = suite(agents=[{"name": "solver", "directory": ".", "command": "true"}])
HOUR = timedelta(hours=1)
FAMILY = """
class TaskFamily:
    standard_version = "0.5.0"

    @staticmethod
    def get_tasks():
        return {"main": {}}
"""


class Cloud:
    """Says what it is told to say."""

    name = "moon"
    region = "crater"

    def __init__(self) -> None:
        self.alive_by_role = {"primary": True}
        self.ending_told = TerminationReason()
        self.cleared: list[str] = []
        self.complete = True

    def terraform_variables(self, ours: Mapping[str, str]) -> dict[str, str]:
        return {}

    def alive(self, _: Environment, role: str) -> bool:
        return self.alive_by_role[role]

    def termination_reason(self, _environment: Environment, _role: str) -> TerminationReason:
        return self.ending_told

    def impairment(self, _environment: Environment, _role: str) -> str:
        return ""

    def delete_resources(self, found: EnvironmentResources) -> bool:
        self.cleared.append(found.environment)
        return self.complete

    def list_resources(self, _: object) -> list[EnvironmentResources]:
        return []

    def renew_lease(self, _: Environment) -> None:
        pass

    def authorize(self, *_: object) -> None:
        pass


@pytest.fixture
def cloud() -> Cloud:
    return Cloud()


@pytest.fixture
def attempt(tmp_path: Path, cloud: Cloud) -> Iterator[Attempt]:
    home = Home(tmp_path / "home")
    home.make()
    (tmp_path / "fam").mkdir()
    (tmp_path / "fam" / "fam.py").write_text(FAMILY)
    session = Session(home=home, cloud=cloud, database="postgresql://shared")  # type: ignore[arg-type]
    session.__dict__["ledger"] = Ledger(home.ledger)  # a file stands in for the database
    attempt = Attempt(
        session=session, batch="b-1", suite=SUITE, directory=tmp_path, run=RUN, family=load_family(tmp_path / "fam"),
        allowed=(), number=1, create=lambda *_: pytest.fail("nothing is to be created"),
    )  # fmt: skip
    yield attempt
    session.leases.release(attempt.id)  # else it is renewed for as long as the tests run


def reserve(attempt: Attempt, *, launched: timedelta = timedelta(0), left: timedelta = HOUR) -> None:
    """Reserves the cost of the attempt's environment."""
    attempt.session.ledger.reserve(entry(attempt.id, now() - launched, expires_at=now() + left))


def recorded(attempt: Attempt, **changes: Any) -> Environment:
    """A record of the attempt's environment, which is up."""
    size = MachineSize(cpus=1, memory_gib=1, disk_gib=16)
    known = Environment(
        id=attempt.id, cloud="moon", stack="stack", family="fam", task="main", status="ready", attended=True,
        created_at=now(), expires_at=now() + HOUR, started_at=now(), setup=TaskSetup(), full_internet=False,
        machines={"primary": MachineRecord(image="i", size=size, user="root")},
        endpoints={"primary": Endpoint(host="127.0.0.1", port=1)},
    )  # fmt: skip
    return attempt.session.environments.save(known.model_copy(update=changes))


def raising(error: Exception) -> Callable[..., Any]:
    def work(*_: Any, **__: Any) -> Any:
        raise error

    return work


def failure_of(step: Step) -> Failure:
    assert step.failure is not None
    return step.failure


def unsettled(attempt: Attempt) -> int:
    return len(attempt.session.ledger.entries(unsettled=True))


def test_a_dead_workers_creation_keeps_its_reservation(
    attempt: Attempt, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve(attempt)
    cloud.complete = False
    assert failure_of(attempt.up()).interrupted
    assert attempt.end(came_up=False).removal_error == ""
    assert (unsettled(attempt), len(cloud.cleared)) == (1, 2)
    # Only once its Terraform surely has ended is the cloud believed.
    monkeypatch.setattr(module, "MAX_CREATION", timedelta(seconds=1))
    assert attempt.costs([attempt.id]).cost_error == ""
    assert (unsettled(attempt), len(cloud.cleared)) == (0, 3)


def test_a_crashed_reservation_without_a_record_is_settled(attempt: Attempt, cloud: Cloud) -> None:
    reserve(attempt)
    cloud.complete = False
    session = replace(attempt.session, database="")
    replace(attempt, session=session).end(came_up=False)
    assert unsettled(attempt) == 0


@pytest.mark.parametrize(("complete", "came_up", "launched"), [(True, False, 0), (False, True, 0), (False, False, 30)])
def test_what_surely_was_created_to_its_end_is_settled_at_once(
    attempt: Attempt, cloud: Cloud, complete: bool, came_up: bool, launched: int
) -> None:
    reserve(attempt, launched=timedelta(minutes=launched))
    cloud.complete = complete
    attempt.end(came_up=came_up)
    assert unsettled(attempt) == 0


@pytest.mark.parametrize(
    ("words", "began", "retry"), [("spot", True, True), ("", True, False), ("", False, True)], ids=["cloud", "?", "up"]
)
def test_the_loss_of_a_machine_is_retried_on_the_clouds_words(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch, words: str, began: bool, retry: bool
) -> None:
    recorded(attempt, agent_at=now() if began else None)
    monkeypatch.setattr(lifecycle, "score", raising(MachineLostError("It is lost: spot.", cloud_words=words)))
    failure = failure_of(attempt.score(now()))
    assert (failure.outcome, failure.retry, failure.message) == ("infrastructure_failed", retry, "It is lost: spot.")


@pytest.mark.parametrize(("step", "outcome"), [("agent", "timed_out"), ("score", "task_failed")])
def test_a_machine_that_its_ttl_ended_is_not_retried(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch, step: str, outcome: str
) -> None:
    recorded(attempt, expires_at=now() - HOUR)
    monkeypatch.setattr(agent, "run_agent", raising(MachineLostError("No answer.")))
    monkeypatch.setattr(lifecycle, "score", raising(MachineLostError("No answer.")))
    failure = failure_of(attempt.agent() if step == "agent" else attempt.score(now()))
    assert (failure.outcome, failure.retry) == (outcome, False)


def test_a_submission_that_cannot_be_read_is_the_agents_fault(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded(attempt)
    for error, outcome in ((SubmissionError("A directory."), "agent_failed"), (TaskError("It broke."), "task_failed")):
        monkeypatch.setattr(lifecycle, "score", raising(error))
        failure = failure_of(attempt.score(now()))
        assert failure.outcome == outcome
        (attempt.session.environments.logs(attempt.id) / "step-score.json").unlink()


def test_scoring_that_was_cut_short_is_done_anew_and_counts_once(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = now()
    entries = tuple(
        ScoreLogEntry(
            score=score, message={}, details={}, scored_at=ended + timedelta(seconds=after), elapsed_seconds=1
        )
        for score, after in ((0.1, -60), (0.2, 1))
    )
    recorded(attempt, score_log=entries)
    seen: list[tuple[float | None, ...]] = []

    def score(_session: Session, environment: Environment, _submission: str | None) -> Any:
        seen.append(tuple(entry.score for entry in environment.score_log))
        raise TaskError("It broke.")

    monkeypatch.setattr(lifecycle, "score", score)
    attempt.score(ended)
    assert seen == [(0.1,)]
    known = attempt.session.environments.find(attempt.id)
    assert [entry.score for entry in known.score_log] == [0.1]


def test_a_step_says_how_many_scores_there_were(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DESTROY_PAUSES", ())
    entry = ScoreLogEntry(score=0.1, message={}, details={}, scored_at=now(), elapsed_seconds=1)
    recorded(attempt, score_log=(entry,) * 1200)
    ended = attempt.end()
    assert ended.score_log_entries == 1200
    assert len(ended.score_log) < 600


def test_dropped_scores_keep_what_others_change(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = ScoreLogEntry(score=0.2, message={}, details={}, scored_at=now() + HOUR, elapsed_seconds=1)
    known = recorded(attempt, score_log=(entry,))
    later = known.expires_at + HOUR

    def extend(session: Session, environment: Environment) -> None:
        session.environments.update(environment, expires_at=later)

    monkeypatch.setattr(claims, "take_lease", extend)
    monkeypatch.setattr(lifecycle, "score", raising(TaskError("No score.")))
    attempt.score(now())
    current = attempt.session.environments.find(attempt.id)
    assert (current.score_log, current.expires_at) == ((), later)


def test_a_resumed_run_is_looked_after_by_its_new_process(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(attempt)
    attended: list[bool] = []

    def work(*_: Any, **__: Any) -> Any:
        attended.append(is_locked(attempt.session.environments.lease(attempt.id)))
        raise TaskError("It broke.")

    monkeypatch.setattr(agent, "run_agent", work)
    attempt.agent()
    assert attended == [True]


def test_a_start_that_outlives_the_limit_is_the_tasks_fault(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*_: Any) -> Any:
        reserve(attempt, launched=HOUR, left=-timedelta(seconds=1))
        raise MachineLostError("No answer.")

    monkeypatch.setattr(planning, "plan", lambda *_: None)
    monkeypatch.setattr(lifecycle, "launch", launch)
    failure = failure_of(attempt.up())
    assert (failure.outcome, failure.retry) == ("task_failed", False)


def test_a_run_that_waits_for_budget_plans_once(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = attempt.session.ledger
    done: list[str] = []
    ledger.reserve(entry("other", now(), reserved_micro_usd=1))

    def launch(*_: Any) -> Any:
        done.append("launch")
        if len(done) == 2:
            ledger.settle("other", now(), 1)  # between the refusal and the question which run holds
            raise BudgetError("It does not fit.")
        if len(done) == 3:
            raise TaskError("It broke.")
        raise BudgetError("It does not fit.")

    monkeypatch.setattr(module, "BUDGET_POLL_SECONDS", 0.0)
    monkeypatch.setattr(planning, "plan", lambda *_: done.append("plan"))
    monkeypatch.setattr(lifecycle, "launch", launch)
    failure = failure_of(attempt.up())
    assert (failure.message, done) == ("It broke.", ["plan", "launch", "launch"])


def test_a_run_that_never_fits_the_budget_does_not_wait(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    reserve(replace(attempt, number=2))

    def launch(*_: Any) -> Any:
        raise BudgetError("It never fits.", may_fit_later=False)

    def wait(*_: Any) -> None:
        raise AssertionError("it waited")

    monkeypatch.setattr(signals, "wait", wait)
    monkeypatch.setattr(planning, "plan", lambda *_: None)
    monkeypatch.setattr(lifecycle, "launch", launch)
    failure = failure_of(attempt.up())
    assert (failure.outcome, failure.message) == ("over_budget", "It never fits.")


def test_a_run_does_not_wait_for_what_it_still_holds_itself(
    attempt: Attempt, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud.complete = False
    reserve(attempt, launched=timedelta(minutes=11))
    again = replace(attempt, number=2)

    def launch(*_: Any) -> Any:
        raise BudgetError("It does not fit.") if unsettled(attempt) else TaskError("It broke.")

    monkeypatch.setattr(module, "BUDGET_POLL_SECONDS", 0.0)
    monkeypatch.setattr(planning, "plan", lambda *_: None)
    monkeypatch.setattr(lifecycle, "launch", launch)
    failure = failure_of(again.up())
    assert failure.message == "It broke."
    assert cloud.cleared == [attempt.id]


def test_whatever_fails_at_the_end_is_tried_again_and_told(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(attempt, started_at=None)
    tries: list[int] = []

    def destroy(*_: Any) -> Any:
        tries.append(1)
        raise OSError("No space left on device")

    monkeypatch.setattr(module, "DESTROY_PAUSES", (0.0, 0.0))
    monkeypatch.setattr(lifecycle, "destroy", destroy)
    assert "No space left on device" in attempt.end().removal_error
    assert len(tries) == 3


@pytest.mark.parametrize("step", ["agent", "score"])
def test_what_a_stop_has_ended_is_an_interruption_to_the_next_process(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def do() -> Failure | None:
        return (attempt.agent() if step == "agent" else attempt.score(now())).failure

    recorded(attempt, agent_at=now())
    monkeypatch.setattr(agent, "run_agent", raising(Interrupted("stopped")))
    monkeypatch.setattr(lifecycle, "score", raising(Interrupted("stopped")))
    with pytest.raises(Interrupted):
        do()
    monkeypatch.setattr(agent, "run_agent", lambda *_: pytest.fail("it is followed"))
    monkeypatch.setattr(lifecycle, "score", lambda *_: pytest.fail("it is scored"))
    assert do() == interruption("it was stopped")


@pytest.mark.parametrize("step", ["agent", "score"])
def test_no_step_is_done_in_an_environment_whose_end_has_begun(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    recorded(attempt, started_at=now(), agent_at=now())
    seen: list[str] = []

    def dying(session: Session, environment: Environment) -> None:
        seen.append(session.environments.find(environment.id).status)
        raise SystemExit

    monkeypatch.setattr(module, "keep_journals", dying)
    with pytest.raises(SystemExit):
        attempt.end(came_up=True)
    assert seen == ["destroying"]
    failure = (attempt.agent() if step == "agent" else attempt.score(now())).failure
    assert failure == interruption("it was stopped")


@pytest.mark.parametrize("step", ["agent", "score"])
@pytest.mark.parametrize("is_gone", [False, True], ids=["destroying", "gone"])
@pytest.mark.parametrize("error", [AgentError, MachineLostError, TaskError, UsageError, ValueError])
def test_what_fails_while_others_destroy_is_an_interruption(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch, step: str, is_gone: bool, error: type[Exception]
) -> None:
    known = recorded(attempt, agent_at=now())
    store = attempt.session.environments

    def destroyed(*_: Any) -> Any:
        if is_gone:
            store.archive(known)
        else:
            store.update(known, status="destroying")
        raise error("It failed.")

    monkeypatch.setattr(agent, "run_agent", destroyed)
    monkeypatch.setattr(lifecycle, "score", destroyed)
    failure = (attempt.agent() if step == "agent" else attempt.score(now())).failure
    assert failure == interruption("its environment is gone" if is_gone else "it was stopped")
    assert store.directory(attempt.id).exists() is not is_gone


@pytest.mark.parametrize("error", [SubmissionError, AgentError])
def test_what_the_agent_decided_stays_whatever_others_destroy(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """An AgentError only once the environment's time is over: a destruction cuts connections, too."""
    known = recorded(attempt, agent_at=now())

    def failed(*_: Any) -> NoReturn:
        over = now() if error is AgentError else known.expires_at
        attempt.session.environments.update(known, status="destroying", expires_at=over)
        raise error("It failed.")

    monkeypatch.setattr(lifecycle, "score", failed)
    failure = failure_of(attempt.score(now()))
    assert failure.outcome == "agent_failed"


def test_a_full_disk_does_not_keep_what_shall_go(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    known = recorded(attempt)
    monkeypatch.setattr("provisioner.machines.recordings.write_atomically", raising(OSError("No space left on device")))
    monkeypatch.setattr(type(attempt.session.cloud), "console", lambda *_: "text", raising=False)
    keep_logs(attempt.session, known, attempt.session.environments.live_logs(known.id))
    monkeypatch.setattr("provisioner.store.environments.write_atomically", raising(OSError("No space left on device")))
    assert marked(attempt.session, known, "destroying") == known


def test_an_unreadable_environment_is_destroyed(
    attempt: Attempt, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve(attempt)
    recorded(attempt)
    (attempt.session.environments.directory(attempt.id) / "environment.json").write_text("{")
    assert attempt._existing_environment() == (None, "its record cannot be read")
    assert attempt.end(came_up=True).removal_error == ""
    assert cloud.cleared == [attempt.id]
    assert attempt.session.ledger.entries(unsettled=True) == []
    assert not attempt.session.environments.directory(attempt.id).exists()


def test_the_end_of_what_is_gone_keeps_its_score_log(
    attempt: Attempt, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged = ScoreLogEntry(score=0.5, message={"n": 1}, scored_at=now(), elapsed_seconds=7)
    known = recorded(attempt, score_log=(logged,), status="creating", endpoints={}, started_at=None)
    attempt.session.environments.archive(known)
    (remains := attempt.session.environments.directory(attempt.id)).mkdir()
    reserve(attempt)
    monkeypatch.setattr(module, "DESTROY_PAUSES", ())
    with monkeypatch.context() as patch:
        patch.setattr(type(attempt.session.environments), "forget", raising(OSError("Read-only file system")))
        assert "Read-only" in attempt.end(came_up=True).removal_error
    assert (cloud.cleared, attempt.session.ledger.entries(unsettled=True)) == ([attempt.id], [])
    [kept] = attempt.end(came_up=True).score_log
    assert (kept.score, kept.message, kept.elapsed_seconds, remains.exists()) == (0.5, {"n": 1}, 7, False)


@pytest.mark.parametrize("fails", ["up", "agent"])
def test_the_row_of_a_run_that_failed_agrees_with_the_seal(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fails: str
) -> None:
    facts: dict[str, Any] = {"environment": attempt.id, "cloud": "moon", "region": "crater"}
    up = UpStep(at=now(), begun_at=now(), **facts)
    known = recorded(attempt, family_version="2", agent_files="a" * 64 if fails == "agent" else "", started_at=None)
    agent_step = None
    if fails == "agent":
        monkeypatch.setattr(agent, "run_agent", raising(AgentError("It switched its machine off.")))
        agent_step = attempt.agent()
    else:
        up = up.model_copy(update={"failure": Failure(outcome="task_failed", message="start() failed.")})

    def destroy(session: Session, environment: Environment, _: object) -> None:
        session.environments.archive(sealed(session, environment))

    monkeypatch.setattr(lifecycle, "destroy", destroy)
    end = attempt.end()
    row = build_row(RUN, [AttemptResult(up=up, agent=agent_step, end=end)], Costs(at=now()), "1")
    assert (row.family_version, row.agent_files, row.images) == ("2", known.agent_files, {"primary": "i"})
    (tmp_path / "results.jsonl").write_text(as_jsonl([row]))
    logs = attempt.session.environments.archived_logs(attempt.id)
    [checked] = check_results(tmp_path / "results.jsonl", lambda _: [logs])
    assert (checked.problems, checked.head) == ((), row.recording)
