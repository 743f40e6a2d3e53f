"""Tests an environment's life from plan to destroy, including failures on the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from provisioner.base.clock import now
from provisioner.base.errors import (
    CapacityError,
    ImageBuildError,
    IsolationError,
    MachineLostError,
    MissingVariablesError,
    StillThereError,
    SubmissionError,
    TaskError,
    UsageError,
)
from provisioner.base.models import Destination, Environment, Role
from provisioner.environment import agent, lifecycle, operations, planning
from provisioner.environment.lifecycle import extend
from provisioner.family.loader import TaskFamily
from provisioner.isolation.proof import prove_isolation
from provisioner.machines import claims
from provisioner.session import Phases, Session
from provisioner.ssh.connection import Connection
from provisioner.store.environments import new_id
from provisioner.store.files import is_locked
from tests.unit.fakes.cloud import FakeCloud, assert_nothing_is_left
from tests.unit.fakes.exec_call import Call
from tests.unit.fakes.guest import SETUP, Fails
from tests.unit.fakes.probes import honest_answers
from tests.unit.fakes.world import created, environment, family, told_of, up

ALLOWED = (Destination(cidr="192.0.2.7/32", port=443, host_names=("example.com",)),)


def setup(**task: Any) -> dict[str, Any]:
    return {**SETUP, "tasks": {"main": {"instructions": "Do it.", **task}}}


def test_a_plan_builds_the_image_and_follows_the_setup_data(session: Session, cloud: FakeCloud, tmp_path: Path) -> None:
    planned = planning.plan(session, family(tmp_path), "main", ALLOWED)
    assert planned.setup.instructions == "Do it."
    assert planned.records["primary"].image.startswith("family-fam-")
    assert session.images.finished(planned.records["primary"].image)
    assert planned.allowed == ALLOWED
    assert cloud.existing() == []


@pytest.mark.parametrize(
    ("task", "task_setup", "error", "says"),
    [
        ("other", {}, UsageError, "no task 'other'"),
        ("main", {"required_environment_variables": ["KEY"]}, MissingVariablesError, "not set: KEY"),
    ],
    ids=["task", "variables"],
)
def test_an_impossible_plan_is_a_usage_error(
    session: Session, cloud: FakeCloud, tmp_path: Path, task: str, task_setup: dict[str, Any], error: type, says: str
) -> None:
    cloud.guest_defaults = {"values": {"setup": setup(**task_setup)}}
    with pytest.raises(error, match=says):
        planning.plan(session, family(tmp_path), task)


def test_a_task_with_full_internet_has_no_allowlist(session: Session, cloud: FakeCloud, tmp_path: Path) -> None:
    cloud.guest_defaults = {"values": {"setup": setup(permissions=["full_internet"])}}
    assert planning.plan(session, family(tmp_path), "main", ALLOWED).allowed == ()


def test_an_aux_vm_is_planned_with_its_own_image_and_size(session: Session, cloud: FakeCloud, tmp_path: Path) -> None:
    spec = {"cpu_count_range": [2, 4], "ram_gib_range": [2, 4], "build_steps": [{"type": "shell", "commands": ["ls"]}]}
    cloud.guest_defaults = {"values": {"setup": setup(aux_vm_spec=spec)}}
    planned = planning.plan(session, family(tmp_path), "main")
    assert planned.records["aux"].image.startswith("aux-fam-")
    assert (planned.records["aux"].size.cpus, planned.records["aux"].size.memory_gib) == (2, 2)


def test_an_environment_comes_up_in_phases(session: Session, cloud: FakeCloud, fam: TaskFamily) -> None:
    running = lifecycle.up(session, fam, "main", ALLOWED)
    assert (running.status, running.attended, running.allowed_destinations) == ("ready", False, ALLOWED)
    assert running == session.environments.find(running.id)
    assert [phase.name for phase in running.phases] == ["images", "create", "boot", "isolation", "start"]
    assert {probe.user for probe in running.probes} == {"root", "agent"}
    assert {probe.probe for probe in running.probes if probe.reached} == {"allowed 192.0.2.7:443"}
    assert running.started_at is not None
    assert cloud.guest().operations == ["start", "settle_home"]
    assert cloud.guest().request("settle_home")["instructions"] == "Do it."
    assert cloud.existing() == [f"{running.id}/primary"]
    assert not is_locked(session.environments.lease(running.id))
    assert not is_locked(session.environments.lock(running.id))


def test_an_environment_is_attended_while_it_comes_up(session: Session, fam: TaskFamily) -> None:
    running = lifecycle.bring_up(session, fam, "main", ())
    assert running.attended
    assert is_locked(session.environments.lease(running.id))
    session.leases.release(running.id)


def test_changes_of_others_are_kept_at_the_hand_over(session: Session, cloud: FakeCloud) -> None:
    running = session.environments.update(up(session), attended=True)
    later = extend(session, running, timedelta(hours=1))
    assert lifecycle.leave(session, running) == later.model_copy(update={"attended": False})
    assert session.environments.find("env").expires_at == later.expires_at


def test_an_environment_destroyed_by_others_is_not_handed_over(session: Session, cloud: FakeCloud) -> None:
    running = up(session)
    lifecycle.destroy(session, running)
    with pytest.raises(UsageError, match="env has been destroyed"):
        lifecycle.leave(session, running)
    assert not session.environments.directory("env").exists()


@pytest.mark.parametrize("destroyed", [False, True], ids=["live", "destroyed"])
def test_an_environment_that_cannot_be_handed_over_is_destroyed(
    session: Session, cloud: FakeCloud, fam: TaskFamily, monkeypatch: pytest.MonkeyPatch, destroyed: bool
) -> None:
    def leave(session: Session, environment: Environment) -> Environment:
        if destroyed:
            lifecycle.destroy(session, environment)
        raise KeyboardInterrupt

    monkeypatch.setattr(lifecycle, "leave", leave)
    with pytest.raises(KeyboardInterrupt):
        lifecycle.up(session, fam, "main")
    assert_nothing_is_left(session, cloud)
    [archived] = session.home.archive.glob("fam-main-*")
    assert (archived / "logs" / "console-primary.log").exists()


def test_a_family_with_intermediate_scores_is_scored_first(session: Session, cloud: FakeCloud, tmp_path: Path) -> None:
    cloud.guest_defaults = {"values": {"setup": {**SETUP, "has_intermediate_score": True}}}
    running = lifecycle.up(session, family(tmp_path), "main")
    assert [entry.score for entry in running.score_log] == [0.25]
    assert running.phases[-1].name == "first score"


def test_a_first_score_that_fails_is_a_failed_entry_and_the_agent_runs(
    session: Session, cloud: FakeCloud, tmp_path: Path
) -> None:
    values = {"setup": {**SETUP, "has_intermediate_score": True}, "intermediate_score": Fails("not built yet")}
    cloud.guest_defaults = {"values": values}
    running = lifecycle.up(session, family(tmp_path), "main")
    [entry] = running.score_log
    assert (running.status, entry.score, entry.message) == ("ready", None, {})  # the agent may see a message
    assert "not built yet" in entry.details["failure"]
    assert any("The first score failed" in note and "not built yet" in note for note in told_of(session).notes)


def _leak(request: dict[str, Any]) -> bytes:
    return honest_answers(request).replace(b'"not reached"', b'"reached"', 1)


@pytest.mark.parametrize(
    ("broken", "phase", "error"),
    [
        ({"values": {"start": Fails("no flag")}}, "start", TaskError),
        ({"values": {"settle_home": Fails()}}, "start", TaskError),
        ({"probes": _leak}, "isolation", IsolationError),
        ({"probes": lambda _: b"killed"}, "isolation", IsolationError),
    ],
    ids=["start", "home", "leak", "silence"],
)
def test_a_failed_environment_is_destroyed_and_its_logs_kept(
    session: Session, cloud: FakeCloud, fam: TaskFamily, broken: dict[str, Any], phase: str, error: type[Exception]
) -> None:
    cloud.guest_defaults = broken
    with pytest.raises(error):
        lifecycle.up(session, fam, "main")
    assert_nothing_is_left(session, cloud)
    [archived] = [path for path in session.home.archive.iterdir() if path.name.startswith("fam-main-")]
    assert (archived / "logs" / "console-primary.log").exists()
    breakdown = session.environments.find(archived.name, archived=True).breakdown
    assert breakdown
    assert breakdown.phase == phase
    assert any(note.startswith("Destroying fam-main-") for note in told_of(session).notes)


def test_an_interrupted_bring_up_leaves_nothing(session: Session, cloud: FakeCloud, fam: TaskFamily) -> None:
    interruptions: list[str] = []

    def check() -> None:
        if cloud.existing():
            interruptions.append("stop")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lifecycle.up(replace(session, check=lambda: None if interruptions else check()), fam, "main")
    assert_nothing_is_left(session, cloud)


@pytest.mark.parametrize("moment", ["before start", "in start"])
def test_an_environment_destroyed_during_its_start_says_so(
    session: Session, cloud: FakeCloud, fam: TaskFamily, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    monkeypatch.setattr(claims, "DESTRUCTION_WAIT_SECONDS", 0)
    start = operations.start

    def destroyed_before_start(session: Session, environment: Environment, connections: Any) -> object:
        results = prove_isolation(session, environment, connections)
        lifecycle.destroy(session, environment)
        return results

    def destroyed_in_start(session: Session, environment: Environment, *args: Any, **more: Any) -> None:
        lifecycle.destroy(session, environment)
        start(session, environment, *args, **more)

    if moment == "before start":
        monkeypatch.setattr("provisioner.environment.lifecycle.prove_isolation", destroyed_before_start)
    else:
        monkeypatch.setattr(operations, "start", destroyed_in_start)
    planned = planning.plan(session, fam, "main")
    with pytest.raises(UsageError, match="fam-1 has been destroyed"):
        lifecycle.launch(session, planned, "fam-1", Phases(session.progress))
    assert_nothing_is_left(session, cloud)
    assert not session.environments.directory("fam-1").exists()


def test_a_failed_environment_that_remains_keeps_its_record(
    session: Session, cloud: FakeCloud, fam: TaskFamily
) -> None:
    cloud.guest_defaults = {"values": {"start": Fails()}}
    cloud.terraform_fails("destroy")
    cloud.faults.stuck = True
    with pytest.raises(StillThereError):
        lifecycle.up(session, fam, "main")
    assert [record.status for record in session.environments.all()] == ["destroying"]


def test_a_place_without_capacity_is_followed_by_the_next(
    session: Session, cloud: FakeCloud, fam: TaskFamily, tmp_path: Path
) -> None:
    cloud.next_cloud = FakeCloud(cloud.directory, session.home, region="sea")
    cloud.faults.places = []
    cloud.terraform_fails()
    running = lifecycle.up(session, fam, "main")
    assert running.placement["region"] == "sea"
    assert "crater has no machine to give. Trying another place." in told_of(session).notes
    assert cloud.existing() == [f"{running.id}/primary"]
    cloud.next_cloud.close()


def test_an_error_is_raised_if_every_place_is_full(session: Session, cloud: FakeCloud, fam: TaskFamily) -> None:
    cloud.faults.places = []
    cloud.terraform_fails()
    with pytest.raises(CapacityError, match="crater has no machine to give"):
        lifecycle.up(session, fam, "main")


def test_an_image_that_cannot_be_built_starts_no_environment(
    session: Session, cloud: FakeCloud, tmp_path: Path
) -> None:
    cloud.guest_defaults = {"values": {"install": Fails("no network")}}
    with pytest.raises(ImageBuildError, match="no network"):
        lifecycle.up(session, family(tmp_path), "main")
    assert [run.split()[1][:5] for run in cloud.runs()] == ["build", "build"]
    assert cloud.existing() == []


def test_machines_that_a_killed_process_created_are_used(session: Session, cloud: FakeCloud, fam: TaskFamily) -> None:
    planned = planning.plan(session, fam, "main")
    [booting] = created(session, environment(new_id("fam", "main")))
    running = lifecycle.take_over(session, planned, booting, Phases(session.progress))
    assert (running.status, running.id) == ("ready", booting.id)
    assert [phase.name for phase in running.phases] == ["boot", "isolation", "start"]
    assert is_locked(session.environments.lease(running.id))
    session.leases.release(running.id)


def test_machines_that_cannot_be_used_are_destroyed(session: Session, cloud: FakeCloud, fam: TaskFamily) -> None:
    planned = planning.plan(session, fam, "main")
    [booting] = created(session, environment())
    cloud.end_machine(booting)
    with pytest.raises(Exception, match="did not come up"):
        lifecycle.take_over(session, planned, booting, Phases(session.progress))
    assert session.environments.all() == []


def test_connections_that_nothing_takes_over_are_closed(session: Session) -> None:
    connections: dict[Role, Connection] = {}

    def keep(opened: Mapping[Role, Connection]) -> None:
        connections.update(opened)
        raise MachineLostError("The sample has ended.")

    [booting] = created(session, environment())
    keeping = replace(session, keep=keep)
    with (
        pytest.raises(MachineLostError, match="has ended"),
        lifecycle.proven(keeping, booting, Phases(session.progress)) as (_, primary),
    ):
        assert primary.active
    assert [connection.active for connection in connections.values()] == [False]


def test_a_destroy_runs_the_familys_teardown_first(session: Session, cloud: FakeCloud) -> None:
    running = up(session, environment(has_teardown=True))
    existed: list[tuple[list[str], str]] = []

    def look() -> None:
        existed.append((cloud.existing(), session.environments.find("env").status))

    cloud.machine(running).guest.during["teardown"] = look
    phases = lifecycle.destroy(session, running)
    assert [phase.name for phase in phases] == ["teardown", "destroy"]
    assert existed == [(["env/primary"], "destroying")]
    assert cloud.existing() == []


@pytest.mark.parametrize("change", [{"has_teardown": False}, {"started_at": None}], ids=["none", "not-started"])
def test_no_teardown_runs_without_a_teardown_function_or_a_start(
    session: Session, cloud: FakeCloud, change: dict[str, Any]
) -> None:
    running = session.environments.update(up(session, environment(has_teardown=True)), **change)
    assert [phase.name for phase in lifecycle.destroy(session, running)] == ["destroy"]
    assert cloud.machine(running).guest.operations == []


def test_a_failed_teardown_is_reported_and_the_destroy_continues(session: Session, cloud: FakeCloud) -> None:
    running = up(session, environment(has_teardown=True))
    cloud.machine(running).guest.values["teardown"] = Fails("still busy")
    lifecycle.destroy(session, running)
    assert any("still busy" in note for note in told_of(session).notes)
    assert cloud.existing() == []


def test_an_ended_machine_is_destroyed_without_teardown(session: Session, cloud: FakeCloud) -> None:
    running = up(session, environment(has_teardown=True))
    cloud.end_machine(running)
    lifecycle.destroy(session, running)
    assert session.environments.all() == []


def test_an_environment_that_is_gone_can_be_destroyed_again(session: Session, cloud: FakeCloud) -> None:
    running = up(session)
    lifecycle.destroy(session, running)
    assert lifecycle.destroy(session, running) == ()
    assert cloud.runs() == ["apply env", "destroy env"]


def _follow(session: Session, environment: Environment) -> None:
    agent.run_agent(session, environment, agent.AgentCommand(session.home.root, "true", identity="batch"))


OPERATIONS: dict[str, Callable[[Session, Environment], object]] = {
    "score": lifecycle.score,
    "intermediate-score": lifecycle.intermediate_score,
    "agent": lambda session, env: agent.run_agent(session, env, agent.AgentCommand(session.home.root, "true")),
    "followed-agent": _follow,
    "extension": lambda session, env: extend(session, env, timedelta(hours=1)),
    "hand-over": lifecycle.leave,
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS.keys())
def test_only_a_destruction_works_in_what_is_being_destroyed(
    session: Session, cloud: FakeCloud, operation: Callable[[Session, Environment], object]
) -> None:
    running = up(session, environment(has_intermediate_score=True, agent_at=now()))
    ending = session.environments.update(running, status="destroying")  # by a process that was killed after teardown()
    with pytest.raises(UsageError, match="The destruction of env has begun"):
        operation(session, running)
    assert session.environments.find("env") == ending
    assert (cloud.machine(running).guest.operations, cloud.machine(running).guest.cgroup) == ([], [])
    lifecycle.destroy(session, running)
    assert cloud.existing() == []


def test_a_score_that_a_destruction_overtakes_revives_nothing(session: Session, cloud: FakeCloud) -> None:
    running = up(session, environment(has_intermediate_score=True))

    def overtaken() -> None:
        session.environments.update(running, status="destroying")  # the destruction has waited for a minute

    cloud.machine(running).guest.during["intermediate_score"] = overtaken
    scored, result = lifecycle.score(session, running)
    assert (result.score, len(scored.score_log)) == (0.5, 1)
    assert (scored.status, session.environments.find("env")) == ("destroying", scored)


def test_scoring_uses_the_current_record(session: Session, cloud: FakeCloud) -> None:
    running = up(session, environment(has_intermediate_score=True))
    lifecycle.intermediate_score(session, running)
    scored, _ = lifecycle.intermediate_score(session, running)
    assert [entry.score for entry in scored.score_log] == [0.25, 0.25]
    scored, outcome = lifecycle.score(session, running)
    assert (outcome.kind, outcome.score, len(scored.score_log)) == ("scored", 0.5, 3)


@pytest.mark.parametrize(
    ("answer", "error"),
    [(Fails("no disk"), TaskError), ({"found": False, "reason": "a directory"}, SubmissionError)],
    ids=["task", "submission"],
)
def test_the_agent_is_let_in_although_scoring_failed(
    session: Session, cloud: FakeCloud, answer: Any, error: type[Exception]
) -> None:
    running = up(session)
    guest = cloud.machine(running).guest
    guest.values["read_submission"] = answer
    with pytest.raises(error):
        lifecycle.score(session, running, readmit_agent=True)
    assert guest.cgroup == ["end", "reopen"]


@pytest.mark.parametrize("failure", ["refused", "cut"])
def test_a_score_counts_even_if_the_agent_cannot_be_let_in_again(
    session: Session, cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    running = up(session)
    machine = cloud.machine(running)
    as_root = machine.guest._as_root

    def unwilling(call: Call, stdin: bytes) -> tuple[int, bytes, bytes]:
        if call.argv[-1] != "reopen":
            return as_root(call, stdin)
        if failure == "cut":
            machine.sshd.cut()
        return 1, b"", b"read-only file system"

    monkeypatch.setattr(machine.guest, "_as_root", unwilling)
    _, outcome = lifecycle.score(session, running, readmit_agent=True)
    assert (outcome.score, machine.guest.operations.count("score")) == (0.5, 1)
    assert [note for note in told_of(session).notes if note.startswith("Letting the agent in again: ")]
