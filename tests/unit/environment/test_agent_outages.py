"""What the controller knows of an agent after a long copy, a crash or an outage of its own.

Over real SSH with the program that runs in machines, as in test_agent.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import pytest

from provisioner.clock import now
from provisioner.copying.transfer import COPY_SECONDS
from provisioner.environment import agent as module
from provisioner.environment.agent import Agent, run_agent
from provisioner.environment.lifecycle import intermediate_score
from provisioner.environment.verdicts import primary_runs
from provisioner.errors import TaskError, UsageError
from provisioner.frames import frame
from provisioner.models import Environment
from provisioner.session import Session
from provisioner.ssh.exec_frames import EXIT
from tests.unit.fakes.clock import WaitingClock
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.exec_call import Call
from tests.unit.fakes.guest import Guest
from tests.unit.fakes.world import Trigger, agents, lock_out, told_of
from tests.waiting import until


@pytest.fixture
def checks(session: Session) -> list[int]:
    """Grows whenever the session is checked."""
    checks: list[int] = []
    object.__setattr__(session, "check", lambda: checks.append(1))
    return checks


def stay_silent(clock: WaitingClock, checks: list[int]) -> None:
    """Lets more time pass than a machine that is listened to may be silent, and waits until that was looked at."""
    clock.seconds += 2 * module.SILENCE_SECONDS
    before = len(checks)
    until(lambda: len(checks) > before + 1)


@pytest.fixture
def copies(guest: Guest, monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """What is done while the agent is copied, one action in each copy; afterwards, those that were not."""
    actions: list[Callable[[], object]] = []
    copy = guest._copy_agent

    def act_and_copy(call: Call) -> None:
        actions.pop(0)()
        copy(call)

    monkeypatch.setattr(guest, "_copy_agent", act_and_copy)
    return actions


@pytest.fixture
def calls(guest: Guest, monkeypatch: pytest.MonkeyPatch) -> list[Callable[[Call], int | None]]:
    """What is done before the program in the machine runs, one action in each call; a number is the call's end."""
    actions: list[Callable[[Call], int | None]] = []
    run_program = guest._run_agent

    def act_and_run(call: Call) -> int:
        code = actions.pop(0)(call) if actions else None
        return run_program(call) if code is None else code

    monkeypatch.setattr(guest, "_run_agent", act_and_run)
    return actions


def late(call: Call) -> NoReturn:
    """Says what a machine says of a call whose time is over."""
    call.stdin()
    call.channel.sendall(frame(EXIT, b'{"timed_out": true}'))
    raise EOFError


def unknown(call: Call) -> int:
    call.stdin()
    call.say(b"n 0 0\n")
    return 0


def test_what_changes_while_an_agent_is_copied_is_kept(
    session: Session, cloud: FakeCloud, env: Environment, copies: list[Callable[[], object]], tmp_path: Path
) -> None:
    env = session.environments.update(env, has_intermediate_score=True)
    copies.append(lambda: intermediate_score(session, env))
    run_agent(session, env, Agent(agents(tmp_path / "agent", ""), "true"))
    current = session.environments.find(env.id)
    assert (len(current.score_log), current.agent_at is not None) == (1, True)


@pytest.mark.parametrize("timed_out", [False, True])
def test_an_end_that_was_told_before_the_call_broke_counts(
    session: Session, env: Environment, guest: Guest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, timed_out: bool
) -> None:
    run_program = guest._run_agent

    def run_and_break(call: Call) -> NoReturn:
        run_program(call)
        if timed_out:
            call.channel.sendall(frame(EXIT, b'{"timed_out": true}'))
        raise EOFError

    monkeypatch.setattr(guest, "_run_agent", run_and_break)
    done = run_agent(session, env, Agent(agents(tmp_path / "agent", ""), "exit 3"))
    assert (done.exit_code, done.timed_out) == (3, False)


def test_an_environment_destroyed_during_a_copy_stays_gone(
    session: Session, env: Environment, copies: list[Callable[[], object]], tmp_path: Path
) -> None:
    copies.append(lambda: session.environments.archive(env))
    with pytest.raises(UsageError, match="env has been destroyed"):
        run_agent(session, env, Agent(agents(tmp_path / "agent", ""), "true"))
    assert not session.environments.directory(env.id).exists()


@pytest.fixture
def outage(session: Session, env: Environment, tmp_path: Path) -> tuple[Environment, Agent]:
    """An agent that ended in time while its controller was away until long after its time limit."""
    agent = Agent(agents(tmp_path / "agent", "echo 1; exit 3"), "exec sh run.sh", timedelta(minutes=5), "batch")
    run_agent(session, env, agent)
    current = session.environments.find(env.id)
    return session.environments.update(current, agent_at=now() - timedelta(hours=1)), agent


def test_a_late_controller_believes_that_an_agent_ended(
    session: Session, outage: tuple[Environment, Agent], calls: list[Callable[[Call], int | None]]
) -> None:
    seconds: list[float] = []
    calls.append(lambda call: seconds.append(call.request["timeout_seconds"]))
    done = run_agent(session, *outage)
    assert (done.exit_code, done.timed_out, done.stdout) == (3, False, b"1\n")
    assert seconds == [module.STOPPING_SECONDS]


def test_a_machine_that_answers_slowly_is_asked_again(
    session: Session, outage: tuple[Environment, Agent], calls: list[Callable[[Call], int | None]]
) -> None:
    calls.append(late)
    done = run_agent(session, *outage)
    assert (done.exit_code, done.timed_out, done.stdout) == (3, False, b"1\n")


def test_a_machine_that_never_answers_is_not_asked_forever(
    session: Session, outage: tuple[Environment, Agent], guest: Guest, calls: list[Callable[[Call], int | None]]
) -> None:
    calls += [late] * 5
    assert run_agent(session, *outage).timed_out
    assert (len(calls), guest.cgroup[-1]) == (5 - module.LATE_CALLS, "end")


def test_a_machine_that_a_late_controller_misses_is_retried(
    session: Session,
    outage: tuple[Environment, Agent],
    cloud: FakeCloud,
    calls: list[Callable[[Call], int | None]],
) -> None:
    def cut(_: Call) -> int:
        cloud.machine(outage[0]).sshd.cut()
        return 0

    calls.append(cut)
    assert run_agent(session, *outage).exit_code == 3


def test_the_controllers_outage_is_never_the_agents_doing(
    session: Session,
    env: Environment,
    cloud: FakeCloud,
    clock: WaitingClock,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sshd, over = cloud.machine(env).sshd, tmp_path / "over"
    authorize, answers = sshd.authorize, list[bool | None]()

    def outage() -> None:
        cloud.faults.unreachable = True
        lock_out(sshd)

    def asked(session: Session, environment: Environment) -> bool | None:
        """Asks in vain, three times; each time half an hour has passed, and more."""
        answers.append(primary_runs(session, environment))
        clock.seconds += 2 * module.UNREACHABLE_WITHOUT_LIMIT_SECONDS
        if len(answers) == 3:
            over.touch()
            sshd.authorize = authorize
            cloud.faults.unreachable = False
        return answers[-1]

    monkeypatch.setattr(module, "primary_runs", asked)
    script = f"echo begun; while [ ! -e {over} ]; do sleep 0.05; done; exit 3"
    agent = Agent(agents(tmp_path / "agent", script), "exec sh run.sh")
    assert run_agent(replace(session, progress=Trigger(outage)), env, agent).exit_code == 3
    assert answers == [None] * 3


@pytest.fixture
def crashed(session: Session, env: Environment, tmp_path: Path) -> tuple[Environment, Agent]:
    """An agent whose controller crashed before it had started it."""
    agent = Agent(agents(tmp_path / "agent", "echo 1"), "sh run.sh", timedelta(minutes=1), "batch")
    return session.environments.update(env, agent_at=now()), agent


def test_a_copy_shows_no_signs_of_life_and_is_not_given_up(
    session: Session,
    crashed: tuple[Environment, Agent],
    copies: list[Callable[[], object]],
    clock: WaitingClock,
    checks: list[int],
) -> None:
    copies.append(lambda: stay_silent(clock, checks))
    assert run_agent(session, *crashed).stdout == b"1\n"
    assert told_of(session).notes == []


def test_a_copy_that_does_not_end_is_not_the_agents_timeout(
    session: Session, crashed: tuple[Environment, Agent], guest: Guest, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds: list[float] = []

    def copy(call: Call) -> None:
        seconds.append(call.request["timeout_seconds"])
        late(call)

    monkeypatch.setattr(guest, "_copy_agent", copy)
    with pytest.raises(TaskError, match="could not be copied"):
        run_agent(session, *crashed)
    assert seconds == [COPY_SECONDS]


def test_a_machine_without_the_agent_gets_one_copy_of_it(
    session: Session,
    crashed: tuple[Environment, Agent],
    copies: list[Callable[[], object]],
    calls: list[Callable[[Call], int | None]],
) -> None:
    copies += [lambda: None] * 3
    calls += [unknown] * 20
    assert "not known how the agent ended" in run_agent(session, *crashed).problem
    assert (len(copies), len(calls)) == (2, 20 - 1 - module.PROGRAM_FAILURES)


def test_the_end_of_an_agent_that_resists_is_not_given_up(
    session: Session,
    env: Environment,
    guest: Guest,
    calls: list[Callable[[Call], int | None]],
    clock: WaitingClock,
    checks: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls.append(late)
    agent = Agent(agents(tmp_path / "agent", ""), "exec sh run.sh", timedelta(minutes=1))
    with monkeypatch.context() as patched:
        patched.setattr(guest, "kill_agent", lambda: stay_silent(clock, checks))
        assert run_agent(session, env, agent).timed_out
    assert (told_of(session).notes, guest.cgroup) == ([], ["end"])
