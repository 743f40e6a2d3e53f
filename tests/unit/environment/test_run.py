"""Tests whole runs, which destroy the environment at the end whatever happens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from provisioner.clouds.findings import TerminationReason
from provisioner.environment.run import AgentCommand, run, run_tests
from provisioner.errors import AgentError, TaskError, UsageError
from provisioner.family.loader import TaskFamily
from provisioner.session import Session
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.guest import Fails
from tests.unit.fakes.world import Told, Trigger, agents


@pytest.fixture
def agent(tmp_path: Path) -> AgentCommand:
    return AgentCommand(agents(tmp_path / "agent", "echo worked > ../submission.txt; exit 3"), "sh run.sh")


def assert_nothing_is_left(session: Session, cloud: FakeCloud) -> None:
    assert cloud.existing() == []
    assert session.environments.all() == []
    assert session.ledger.entries(unsettled=True) == []


def test_a_run_brings_up_runs_the_agent_scores_and_destroys(
    session: Session, cloud: FakeCloud, fam: TaskFamily, agent: AgentCommand
) -> None:
    result = run(session, fam, "main", agent=agent)
    assert (result.outcome.score, result.agent_exit_code, result.task) == (0.5, 3, "main")
    names = ["images", "create", "boot", "isolation", "start", "agent", "score", "destroy"]
    assert [phase.name for phase in result.phases] == names
    assert cloud.guest().operations == ["start", "settle_home", "read_submission", "score"]
    assert (cloud.guest().home / "submission.txt").read_text() == "worked\n"
    assert_nothing_is_left(session, cloud)


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


def test_a_run_whose_agent_switches_its_machine_off_says_so_and_is_destroyed(
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
def test_an_interrupted_run_names_the_environment_that_it_destroys(
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
    assert f"Destroying {identity}: KeyboardInterrupt SIGINT" in progress.notes
    assert_nothing_is_left(session, cloud)


def test_a_run_whose_agent_cannot_be_copied_is_destroyed(
    session: Session, cloud: FakeCloud, fam: TaskFamily, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        run(session, fam, "main", agent=AgentCommand(tmp_path / "nowhere", "true"))
    assert_nothing_is_left(session, cloud)


def test_a_run_that_does_not_start_is_destroyed(session: Session, cloud: FakeCloud, fam: TaskFamily) -> None:
    cloud.guest_defaults = {"values": {"start": Fails()}}
    with pytest.raises(TaskError, match="it broke"):
        run(session, fam, "main", submission="7")
    assert_nothing_is_left(session, cloud)


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
