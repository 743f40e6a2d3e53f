"""Attack: an agent whose work went badly makes its machine fail, so that its run gets a fresh attempt.

It kills the sshd that serves it, keeps everybody out, switches the machine off, or takes the memory or the processes
that scoring needs, or the memory of its host. What must hold: one attempt, which counts as the agent's failure or is
scored. Only what the cloud says is retried, in its words; a record or a lease that fails afterwards is not.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from provisioner.base.clock import now
from provisioner.base.config import Settings
from provisioner.base.errors import InfrastructureError
from provisioner.base.models import Environment
from provisioner.batch.attempt import Attempt
from provisioner.batch.suite import Run, Suite
from provisioner.clouds.cloud import TerminationReason
from provisioner.clouds.local.cloud import LocalCloud
from provisioner.clouds.local.vm import shutdown
from provisioner.environment import agent, lifecycle, operations
from provisioner.environment.outcomes import attribute_loss, primary_runs
from provisioner.machines import claims
from provisioner.session import Session
from provisioner.store.home import Home
from tests.unit.fakes.clock import WaitingClock
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.sshd import Sshd
from tests.unit.fakes.world import Trigger, agents, environment, family, lock_out, up

RUN = Run(key="fam/main/solver/1", family="/fam", task="main", agent="solver", repetition=1)
# The agent continues once there is a file `on` beside its directory.
SCRIPT = "echo begun; while [ ! -e {on} ]; do sleep 0.05; done; echo ended; exit 3"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens the pauses between attempts."""
    monkeypatch.setattr(agent, "PAUSES_SECONDS", (0.1,))
    monkeypatch.setattr(lifecycle, "SCORING_PAUSES_SECONDS", (0.0, 0.0))


@pytest.fixture
def attempt(session: Session, tmp_path: Path) -> Attempt:
    agents(tmp_path / "agent", SCRIPT.format(on=tmp_path / "on"))
    solver = {"name": "solver", "directory": "agent", "command": "exec sh run.sh"}
    suite = {"name": "s", "families": [{"path": "fam"}], "agents": [solver], "limits": {"ttl": "1h", "agent": "10m"}}
    return Attempt(
        session=session, batch="b-1", suite=Suite.model_validate(suite), directory=tmp_path, run=RUN,
        family=family(tmp_path), allowed=(), number=1, create=lambda *_: pytest.fail("nothing is to be created"),
    )  # fmt: skip


@pytest.fixture
def env(attempt: Attempt) -> Environment:
    return up(attempt.session, environment(attempt.id))


@pytest.fixture
def sshd(cloud: FakeCloud, env: Environment) -> Sshd:
    return cloud.machine(env).sshd


def attacked(attempt: Attempt, action: Any) -> Attempt:
    return replace(attempt, session=replace(attempt.session, progress=Trigger(action)))


def test_an_agent_that_kills_its_sshd_breaks_one_connection(attempt: Attempt, sshd: Sshd) -> None:
    def kill() -> None:
        sshd.cut()
        (attempt.directory / "on").touch()

    step = attacked(attempt, kill).agent()
    assert (step.failure, step.exit_code, step.timed_out) == (None, 3, False)
    log = (attempt.session.environments.logs(attempt.id) / "agent.log").read_text()
    assert "begun\nended\n" in log


def test_an_agent_that_locks_the_controller_out_has_failed(
    attempt: Attempt, sshd: Sshd, clock: WaitingClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(session: Session, environment: Environment) -> bool | None:
        clock.seconds += 3600
        return primary_runs(session, environment)

    monkeypatch.setattr(agent, "primary_runs", asked)
    failure = attacked(attempt, lambda: lock_out(sshd)).agent().failure
    assert failure is not None
    assert (failure.outcome, failure.retry) == ("agent_failed", False)


@pytest.mark.parametrize(
    ("reason", "outcome", "retry"),
    [
        pytest.param(TerminationReason("QEMU says guest-shutdown", from_within=True), "agent_failed", False, id="off"),
        pytest.param(TerminationReason("Server.SpotInstanceTermination"), "infrastructure_failed", True, id="spot"),
        pytest.param(TerminationReason(), "infrastructure_failed", False, id="unknown"),
        pytest.param(TerminationReason("QEMU crashed", from_within=None), "infrastructure_failed", False, id="crash"),
    ],
)
@pytest.mark.parametrize("step", ["agent", "score"])
def test_a_machine_that_ends_is_retried_only_on_clouds_words(
    attempt: Attempt,
    env: Environment,
    cloud: FakeCloud,
    monkeypatch: pytest.MonkeyPatch,
    reason: TerminationReason,
    outcome: str,
    retry: bool,
    step: str,
) -> None:
    monkeypatch.setattr(cloud, "termination_reason", lambda *_: reason)
    if step == "agent":
        failure = attacked(attempt, lambda: cloud.end_machine(env)).agent().failure
    else:
        attempt.session.environments.update(env, agent_at=now())
        cloud.machine(env).guest.during["score"] = lambda: cloud.end_machine(env)
        failure = attempt.score(now()).failure
    assert failure is not None
    assert (failure.outcome, failure.retry) == (outcome, retry)
    assert reason.message in failure.message


def test_scoring_cut_short_by_an_agent_is_its_failure(
    attempt: Attempt, env: Environment, sshd: Sshd, cloud: FakeCloud
) -> None:
    attempt.session.environments.update(env, agent_at=now())
    cloud.machine(env).guest.during["score"] = sshd.cut
    failure = attempt.score(now()).failure
    assert failure is not None
    assert (failure.outcome, failure.retry) == ("agent_failed", False)


def test_scoring_whose_connection_breaks_once_is_done_again(
    attempt: Attempt, env: Environment, sshd: Sshd, cloud: FakeCloud
) -> None:
    attempt.session.environments.update(env, agent_at=now())
    cuts = [sshd.cut]
    cloud.machine(env).guest.during["score"] = lambda: cuts.pop()() if cuts else None
    step = attempt.score(now())
    assert (step.failure, step.score) == (None, 0.5)


def test_scoring_is_repeated_if_the_cloud_cannot_be_asked(
    attempt: Attempt, env: Environment, sshd: Sshd, cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One hiccup of the controller's own uplink cuts the connection and the cloud's API."""
    attempt.session.environments.update(env, agent_at=now())
    ask, answers = cloud.alive, iter([InfrastructureError("the API does not answer")])

    def alive(*args: Any) -> bool:
        for error in answers:
            raise error
        return ask(*args)

    def cut() -> None:
        monkeypatch.setattr(cloud, "alive", alive)
        cloud.machine(env).guest.during.clear()
        sshd.cut()

    cloud.machine(env).guest.during["score"] = cut
    step = attempt.score(now())
    assert (step.failure, step.score) == (None, 0.5)


def test_scoring_killed_for_memory_is_the_agents_failure(
    attempt: Attempt, env: Environment, cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt.session.environments.update(env, agent_at=now())
    guest = cloud.machine(env).guest
    help_with = guest._help

    def killed(request: dict[str, Any]) -> tuple[bytes, bytes]:
        said = help_with(request)
        if request["operation"] == "score":
            guest._results[request["result"]] = '{"status": "error", "kind": "exit", "message": "", "exit_code": -9}'
        return said

    monkeypatch.setattr(guest, "_help", killed)
    failure = attempt.score(now()).failure
    assert failure is not None
    assert (failure.outcome, failure.retry) == ("agent_failed", False)


def test_agents_processes_that_do_not_end_are_the_agents_failure(
    attempt: Attempt, env: Environment, cloud: FakeCloud
) -> None:
    attempt.session.environments.update(env, agent_at=now())
    cloud.machine(env).guest.cgroup_exit_code = 1
    failure = attempt.score(now()).failure
    assert failure is not None
    assert (failure.outcome, failure.retry) == ("agent_failed", False)
    assert "processes of the agent do not end" in failure.message


@pytest.mark.parametrize(
    ("killed", "cause"), [pytest.param(1, "agent", id="memory"), pytest.param(0, "unknown", id="crash")]
)
def test_a_machine_that_ends_its_qemu_gets_no_fresh_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: int, cause: str
) -> None:
    """It dirties all its memory, on a host that has too little, and the kernel ends its QEMU; or a bug crashes QEMU."""
    home, env = Home(tmp_path / "home"), environment()
    directory = home.environments / env.id / "primary"
    directory.mkdir(parents=True)
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("oom_kill 7\n")
    monkeypatch.setattr(shutdown, "VMSTAT", vmstat)
    shutdown.prepare(directory)
    vmstat.write_text(f"oom_kill {7 + killed}\n")  # and QEMU has said nothing
    reason = LocalCloud(home, Settings()).termination_reason(env, "primary")
    assert attribute_loss({"primary": reason}, agent_began=True, expired=False).cause == cause


@pytest.mark.parametrize("answer", ["x", None, [1], {"found": True}], ids=["text", "null", "list", "no_text"])
def test_an_agent_that_answers_for_its_submission_has_failed(
    attempt: Attempt,
    env: Environment,
    cloud: FakeCloud,
    answer: object,
) -> None:
    attempt.session.environments.update(env, agent_at=now())
    cloud.machine(env).guest.values["read_submission"] = answer
    failure = attempt.score(now()).failure
    assert failure is not None
    assert (failure.outcome, failure.retry) == ("agent_failed", False)
    assert "The submission cannot be read" in failure.message


@pytest.mark.parametrize("began", [True, False])
def test_our_error_that_an_agent_provokes_is_the_agents(
    attempt: Attempt,
    env: Environment,
    cloud: FakeCloud,
    monkeypatch: pytest.MonkeyPatch,
    began: bool,
) -> None:
    def fail(*_: Any) -> None:
        raise RecursionError("too deep")

    attempt.session.environments.update(env, agent_at=now() if began else None)
    monkeypatch.setattr(operations, "classify_score", fail)
    failure = attempt.score(now()).failure
    assert failure is not None
    assert (failure.outcome, failure.retry) == ("agent_failed" if began else "infrastructure_failed", False)
    assert "score" in cloud.machine(env).guest.operations


def damage(attempt: Attempt) -> None:
    (attempt.session.environments.directory(attempt.id) / "environment.json").write_text("{")


@pytest.mark.parametrize("step", ["agent", "score"])
def test_an_unreadable_record_gives_no_fresh_attempt(attempt: Attempt, env: Environment, step: str) -> None:
    attempt.session.environments.update(env, agent_at=now())
    damage(attempt)
    failure = (attempt.agent() if step == "agent" else attempt.score(now())).failure
    assert failure is not None
    assert (failure.outcome, failure.retry) == ("infrastructure_failed", False)


def test_a_damaged_record_during_a_loss_gives_no_fresh_attempt(
    attempt: Attempt, env: Environment, sshd: Sshd, cloud: FakeCloud
) -> None:
    attempt.session.environments.update(env, agent_at=now())

    def lose() -> None:
        damage(attempt)
        sshd.cut()

    cloud.machine(env).guest.during["score"] = lose
    failure = attempt.score(now()).failure
    assert failure is not None
    assert (failure.outcome, failure.retry) == ("infrastructure_failed", False)


@pytest.mark.parametrize("began", [True, False])
def test_a_failed_lease_is_retried_only_before_the_agent(
    attempt: Attempt, env: Environment, monkeypatch: pytest.MonkeyPatch, began: bool
) -> None:
    def fail(*_: Any) -> None:
        raise InfrastructureError("The lease cannot be renewed.")

    attempt.session.environments.update(env, agent_at=now() if began else None)
    monkeypatch.setattr(claims, "take_lease", fail)
    failure = attempt.agent().failure
    assert failure is not None
    assert (failure.outcome, failure.retry) == ("infrastructure_failed", not began)
