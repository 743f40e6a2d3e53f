"""Tests whole runs, which destroy the environment at the end whatever happens."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from provisioner.base.errors import AgentError, IsolationError, StillThereError, TaskError, UsageError
from provisioner.base.models import Environment
from provisioner.clouds.cloud import TerminationReason
from provisioner.environment import lifecycle
from provisioner.environment.agent import AgentCommand
from provisioner.environment.run import run, run_tests
from provisioner.family.loader import TaskFamily
from provisioner.machines import claims, launch
from provisioner.machines.destroy import clear_away
from provisioner.recording import casts
from provisioner.recording.manifest import load
from provisioner.session import Session
from tests.unit.fakes.cloud import FakeCloud, assert_nothing_is_left
from tests.unit.fakes.guest import SETUP, Fails
from tests.unit.fakes.world import Told, Trigger, agents, family, store_image, told_of


@pytest.fixture
def agent(tmp_path: Path) -> AgentCommand:
    return AgentCommand(agents(tmp_path / "agent", "echo worked > ../submission.txt; exit 3"), "sh run.sh")


def test_a_run_brings_up_runs_the_agent_scores_and_destroys(
    session: Session, cloud: FakeCloud, fam: TaskFamily, agent: AgentCommand
) -> None:
    result = run(session, fam, "main", agent=agent)
    assert (result.outcome.score, result.agent_exit_code, result.task) == (0.5, 3, "main")
    names = ["images", "create", "boot", "isolation", "start", "agent", "score", "destroy"]
    assert [phase.name for phase in result.phases] == names
    assert cloud.guest().operations == ["start", "settle_home", "read_submission", "score"]
    assert (cloud.guest().home / "submission.txt").read_text() == "worked\n"
    record = session.environments.find(result.environment, archived=True)
    assert record.outcome
    assert (record.agent_exit_code, record.outcome.status, record.outcome.score) == (3, "scored", 0.5)
    assert record.breakdown is None
    assert_nothing_is_left(session, cloud)


def test_a_run_carries_the_warnings_of_its_task(session: Session, tmp_path: Path) -> None:
    fam = family(tmp_path)
    tasks = {"main": {"warnings": ["It differs."]}, "other": {"warnings": ["Another."]}}
    store_image(session, fam, {**SETUP, "tasks": tasks})
    result = run(session, fam, "main", submission="7")
    assert result.warnings == ("It differs.",)
    assert session.environments.find(result.environment, archived=True).setup.warnings == result.warnings


def test_a_run_carries_the_hash_of_its_sealed_logs(session: Session, fam: TaskFamily, agent: AgentCommand) -> None:
    result = run(session, fam, "main", agent=agent)
    logs = session.environments.archived_logs(result.environment)
    sealed = load(logs)
    assert result.recording == sealed.head
    assert (sealed.facts["score"], sealed.facts["agent_exit_code"]) == (0.5, 3)
    parts = [json.loads(line)["part"] for line in (logs / "calls.jsonl").read_text().splitlines()]
    assert [part for part in parts if part in ("start", "agent", "score")] == ["start", "agent", "score"]
    assert casts.header_of(logs / "agent-1.cast").command == "sh run.sh"


def test_an_unrecorded_run_has_its_logs_sealed(session: Session, fam: TaskFamily) -> None:
    result = run(replace(session, record=False), fam, "main", submission="7")
    names = {entry.name for entry in load(session.environments.archived_logs(result.environment)).entries}
    assert "score.log" in names
    assert [name for name in names if not name.endswith((".log", ".txt"))] == ["isolation.json"]
    assert len(result.recording) == 64


def test_a_given_submission_is_scored_without_an_agent(session: Session, cloud: FakeCloud, fam: TaskFamily) -> None:
    result = run(session, fam, "main", submission="7")
    assert result.agent_exit_code is None
    assert "read_submission" not in cloud.guest().operations
    assert list(cloud.guest().files.values()) == [b"7"]


def test_a_failed_scoring_is_a_result_not_an_error(session: Session, cloud: FakeCloud, fam: TaskFamily) -> None:
    cloud.guest_defaults = {"values": {"score": Fails("division by zero")}}
    result = run(session, fam, "main", submission="7")
    assert (result.outcome.kind, result.outcome.score) == ("exception", None)
    assert "division by zero" in result.outcome.message
    assert_nothing_is_left(session, cloud)


def test_a_run_whose_agent_powers_off_is_destroyed(
    session: Session, cloud: FakeCloud, fam: TaskFamily, agent: AgentCommand
) -> None:
    def end_machine() -> None:
        [environment] = session.environments.all()
        cloud.end_machine(environment)

    (agent.directory / "run.sh").write_text("echo begun; sleep 1000")
    cloud.ending = TerminationReason("QEMU says guest-shutdown", from_within=True)
    with pytest.raises(AgentError, match=r"guest-shutdown.*Nothing more can be scored"):
        run(replace(session, progress=Trigger(end_machine)), fam, "main", agent=agent)
    assert_nothing_is_left(session, cloud)


@pytest.mark.parametrize("work", ["agent", "tests"])
def test_an_interrupted_run_names_the_environment(
    session: Session, cloud: FakeCloud, fam: TaskFamily, agent: AgentCommand, work: str
) -> None:
    class Interrupted(Told):
        def phase_started(self, name: str) -> None:
            super().phase_started(name)
            if name == work:
                raise KeyboardInterrupt("SIGINT")

    progress = Interrupted()
    interrupted = replace(session, progress=progress)
    with pytest.raises(KeyboardInterrupt):
        run(interrupted, fam, "main", agent=agent) if work == "agent" else run_tests(interrupted, fam, "main", [])
    [identity] = [path.name for path in session.home.archive.glob("fam-main-*")]
    assert f"Destroying {identity}: interrupted by Ctrl-C" in progress.notes
    assert_nothing_is_left(session, cloud)


@pytest.mark.parametrize("work", ["run", "tests", "up"])
def test_a_ctrl_c_just_after_it_came_up_destroys_it(
    session: Session, cloud: FakeCloud, fam: TaskFamily, monkeypatch: pytest.MonkeyPatch, work: str
) -> None:
    bring_up = lifecycle.bring_up

    def interrupted(*arguments: Any) -> NoReturn:
        bring_up(*arguments)
        raise KeyboardInterrupt("SIGINT")

    monkeypatch.setattr(lifecycle, "bring_up", interrupted)
    monkeypatch.setattr("provisioner.environment.run.bring_up", interrupted)
    works: dict[str, Callable[[], object]] = {
        "run": lambda: run(session, fam, "main", submission="7"),
        "tests": lambda: run_tests(session, fam, "main", []),
        "up": lambda: lifecycle.up(session, fam, "main"),
    }
    with pytest.raises(KeyboardInterrupt):
        works[work]()
    [identity] = [path.name for path in session.home.archive.glob("fam-main-*")]
    assert f"Destroying {identity}: interrupted by Ctrl-C" in told_of(session).notes
    assert_nothing_is_left(session, cloud)


def test_a_ctrl_c_as_the_destruction_begins_leaves_nothing(session: Session, cloud: FakeCloud, fam: TaskFamily) -> None:
    begun: list[int] = []

    @contextlib.contextmanager
    def shield() -> Iterator[None]:
        begun.append(1)
        if len(begun) == 1:
            raise KeyboardInterrupt("SIGINT")
        yield

    with pytest.raises(KeyboardInterrupt):
        run(replace(session, shield=shield), fam, "main", submission="7")
    assert_nothing_is_left(session, cloud)


def test_a_ctrl_c_just_after_the_reservation_settles_it(
    session: Session, cloud: FakeCloud, fam: TaskFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve = claims.reserve

    def interrupted(session: Session, environment: Environment) -> NoReturn:
        reserve(session, environment)
        raise KeyboardInterrupt("SIGINT")

    monkeypatch.setattr(launch, "reserve", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(session, fam, "main", submission="7")
    assert_nothing_is_left(session, cloud)
    assert list(session.home.locks.glob("lease-*")) == []


def test_a_run_whose_agent_cannot_be_copied_is_destroyed(
    session: Session, cloud: FakeCloud, fam: TaskFamily, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        run(session, fam, "main", agent=AgentCommand(tmp_path / "nowhere", "true"))
    assert_nothing_is_left(session, cloud)


def test_a_score_is_told_if_the_environment_cannot_be_destroyed(
    session: Session, cloud: FakeCloud, fam: TaskFamily
) -> None:
    cloud.terraform_fails("destroy")
    cloud.faults.stuck = True
    with pytest.raises(StillThereError):
        run(session, fam, "main", submission="7")
    assert any(note.endswith(", taken before: 0.5") for note in told_of(session).notes)


@pytest.mark.parametrize("fails", ["start", "score", ""], ids=["start", "score", "nothing"])
def test_a_kept_run_leaves_its_environment_to_the_operator(
    session: Session, cloud: FakeCloud, fam: TaskFamily, fails: str
) -> None:
    cloud.guest_defaults = {"values": {fails: Fails()}} if fails else {}
    keeping = replace(session, keep_failed=True)
    with pytest.raises(TaskError) if fails == "start" else contextlib.nullcontext():
        run(keeping, fam, "main", submission="7", keep=True)
    [env] = session.environments.all()
    assert (env.status, env.attended, env.recording) == ("ready", False, "")
    assert cloud.existing() == [f"{env.id}/primary"]
    [told] = [note for note in told_of(session).notes if note.startswith("Kept ")]
    assert f"`provisioner ssh {env.id}`" in told
    assert f"{env.expires_at:%H:%M:%S} UTC" in told
    assert (env.breakdown is not None) == (fails == "start")


def test_an_environment_that_is_not_isolated_is_never_kept(
    session: Session, cloud: FakeCloud, fam: TaskFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leaky(*_: object) -> NoReturn:
        raise IsolationError("A probe shows more.")

    monkeypatch.setattr(lifecycle, "prove_isolation", leaky)
    with pytest.raises(IsolationError):
        run(replace(session, keep_failed=True), fam, "main", submission="7", keep=True)
    assert_nothing_is_left(session, cloud)


@pytest.mark.parametrize("phase", ["start", "score"])
def test_an_environment_that_was_destroyed_meanwhile_is_not_kept(session: Session, fam: TaskFamily, phase: str) -> None:
    class Destroying(Told):
        def phase_started(self, name: str) -> None:
            super().phase_started(name)
            if name == phase:
                [environment] = session.environments.all()
                clear_away(session, environment)

    progress = Destroying()
    keeping = replace(session, progress=progress, keep_failed=True)
    with pytest.raises(UsageError, match="has been destroyed"):
        run(keeping, fam, "main", submission="7", keep=True)
    assert session.environments.all() == []
    assert not [note for note in progress.notes if note.startswith("Kept ")]


def test_running_the_familys_tests_returns_pytests_exit_code(
    session: Session, cloud: FakeCloud, fam: TaskFamily
) -> None:
    cloud.guest_defaults = {"values": {"pytest": {"exit_code": 5}}}
    env, code = run_tests(session, fam, "main", ["-k", "one"])
    assert code == 5
    request = cloud.guest().request("pytest")
    assert (request["arguments"], request["environment"]) == (["-k", "one"], {"TOKEN": "s3cret-value"})
    assert session.environments.find(env.id, archived=True).status == "destroying"
    assert_nothing_is_left(session, cloud)


@pytest.mark.parametrize("fails", [False, True], ids=["passed", "failed"])
def test_keep_leaves_the_environment_of_tests_up(
    session: Session, cloud: FakeCloud, fam: TaskFamily, fails: bool
) -> None:
    if fails:
        cloud.guest_defaults = {"values": {"pytest": Fails()}}
        with pytest.raises(TaskError):
            run_tests(session, fam, "main", [], keep=True)
    else:
        run_tests(session, fam, "main", [], keep=True)
    [env] = session.environments.all()
    assert (env.status, env.attended) == ("ready", False)
    assert cloud.existing() == [f"{env.id}/primary"]
