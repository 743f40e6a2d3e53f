"""Tests how an agent runs detached, by the program that runs in machines, and what outages do to it."""

from __future__ import annotations

import errno
import io
import os
import re
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import pytest

from provisioner.base.clock import now
from provisioner.base.errors import AgentError, HostError, MachineLostError, TaskError, UsageError
from provisioner.base.models import Environment
from provisioner.copying.transfer import COPY_SECONDS
from provisioner.driver.output_tee import LOG_LIMIT_BYTES
from provisioner.environment import agent as module
from provisioner.environment.agent import AgentCommand, run_agent
from provisioner.environment.lifecycle import intermediate_score
from provisioner.environment.outcomes import primary_runs
from provisioner.family.files import digest_files
from provisioner.session import Session
from provisioner.ssh.connection import Connection
from provisioner.ssh.exec_frames import EXIT, frame
from tests.unit.fakes.clock import WaitingClock
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.exec_call import Call
from tests.unit.fakes.guest import Guest
from tests.unit.fakes.world import Trigger, agents, lock_out, told_of
from tests.waiting import BOUND_SECONDS, until


def log(session: Session) -> str:
    return (session.environments.logs("env") / "agent.log").read_text()


def test_an_agent_runs_in_its_own_directory_in_a_login_shell(
    session: Session, env: Environment, guest: Guest, tmp_path: Path
) -> None:
    directory = agents(tmp_path / "agent", "pwd; echo s3cret-value >&2; exit 7")
    done = run_agent(session, env, AgentCommand(directory, "sh run.sh"))
    assert (done.exit_code, done.stdout.decode(), done.problem) == (7, f"{guest.home}/scaffolding\n", "")
    assert log(session).startswith("$ sh run.sh")
    assert "[redacted:TOKEN]" in log(session)
    assert "s3cret-value" not in log(session) + "".join(told_of(session).texts)
    assert session.environments.find(env.id).agent_at is not None


def test_the_hash_of_an_agents_files_is_recorded(
    session: Session, env: Environment, guest: Guest, tmp_path: Path
) -> None:
    def recorded(text: str) -> str:
        directory = agents(tmp_path / "agent", text)
        (directory / ".venv").mkdir(exist_ok=True)
        (directory / ".venv" / os.fsdecode(b"\xff")).write_text("x")
        (directory / "link").unlink(missing_ok=True)
        (directory / "link").symlink_to("/nowhere")
        run_agent(session, env, AgentCommand(directory, "true"))
        return session.environments.find(env.id).agent_files

    first = recorded("exit 1")
    assert re.fullmatch("[0-9a-f]{64}", first)
    assert (recorded("exit 2") == first, recorded("exit 1") == first) == (False, True)
    program, more = tmp_path / "agent" / "run.sh", tmp_path / "agent" / ".venv" / "more"
    program.chmod(0o755)
    assert recorded("exit 1") != first
    program.chmod(0o644)
    assert recorded("exit 1") == first
    more.symlink_to("a")
    linked = recorded("exit 1")
    more.unlink()
    more.symlink_to("b")
    assert len({first, linked, recorded("exit 1")}) == 3
    more.unlink()
    more.hardlink_to(program)
    names = [".venv/more", os.fsdecode(b".venv/\xff"), "link", "run.sh"]
    assert recorded("exit 1") == digest_files(tmp_path / "agent", names)


def test_a_second_agent_replaces_the_first_ones_files(
    session: Session, env: Environment, guest: Guest, tmp_path: Path
) -> None:
    first, second = agents(tmp_path / "first", "echo 1"), agents(tmp_path / "second", "echo 2")
    (first / "old").touch()
    run_agent(session, env, AgentCommand(first, "true"))
    assert run_agent(session, env, AgentCommand(second, "ls; sh run.sh")).stdout == b"run.sh\n2\n"


def test_an_agent_that_cannot_be_copied_is_an_error(
    session: Session, env: Environment, guest: Guest, tmp_path: Path
) -> None:
    guest.home.write_text("a file where the home should be")
    with pytest.raises(TaskError, match="could not be copied"):
        run_agent(session, env, AgentCommand(agents(tmp_path / "agent", ""), "true"))
    assert session.environments.find(env.id).agent_at is None


def test_a_packed_agent_that_cannot_be_read_is_a_host_error(
    session: Session, env: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FailingFile(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(tempfile, "TemporaryFile", FailingFile)
    with pytest.raises(HostError, match=r"^The packed agent cannot be read: Input/output error\.$"):
        run_agent(session, env, AgentCommand(agents(tmp_path / "agent", ""), "true"))
    assert session.environments.find(env.id).agent_at is None


def test_the_machine_ends_an_agent_that_is_too_late(session: Session, env: Environment, tmp_path: Path) -> None:
    directory = agents(tmp_path / "agent", "exec sleep 1000")
    done = run_agent(session, env, AgentCommand(directory, "exec sh run.sh", timedelta(seconds=1)))
    assert (done.timed_out, done.exit_code, done.problem) == (True, None, "")


def test_the_controller_ends_an_agent_that_is_too_late(
    session: Session, env: Environment, guest: Guest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_program, stop = guest._run_agent, module.stop

    def stop_without_haste(connection: Connection) -> None:
        monkeypatch.setattr(module, "STOPPING_SECONDS", BOUND_SECONDS)
        stop(connection)

    monkeypatch.setattr(module, "STOPPING_SECONDS", 1.0)
    monkeypatch.setattr(module, "stop", stop_without_haste)

    def without_limit(call: Any) -> int:
        stdin = call.stdin
        call.stdin = lambda: stdin().replace(b'"limit_seconds": 1.0', b'"limit_seconds": 1000')
        return run_program(call)

    monkeypatch.setattr(guest, "_run_agent", without_limit)
    directory = agents(tmp_path / "agent", "exec sleep 1000")
    done = run_agent(session, env, AgentCommand(directory, "exec sh run.sh", timedelta(seconds=1)))
    assert done.timed_out
    assert guest.cgroup[-1] == "end"


def test_an_agents_output_is_redacted_across_pieces(session: Session, env: Environment, tmp_path: Path) -> None:
    directory = agents(tmp_path / "agent", "printf 's3cr'; sleep 0.5; printf 'et-value and ä'; exit 3")
    done = run_agent(session, env, AgentCommand(directory, "exec sh run.sh"))
    assert (done.exit_code, done.stdout.decode()) == (3, "s3cret-value and ä")
    assert "".join(told_of(session).texts) == "[redacted:TOKEN] and ä"
    assert log(session).rstrip().endswith("[redacted:TOKEN] and ä")


def test_an_agent_that_says_too_much_is_not_held_up(session: Session, env: Environment, tmp_path: Path) -> None:
    directory = agents(tmp_path / "agent", "head -c 30000000 /dev/zero | tr '\\0' x; echo last; exit 5")
    done = run_agent(session, env, AgentCommand(directory, "exec sh run.sh"))
    assert done.exit_code == 5
    assert done.stdout.endswith(b"xlast\n")
    assert len(done.stdout) < (8 << 20) + 1000
    assert done.stdout_size.total_bytes == 30_000_005
    # The machine drops whole pieces of 64 KiB. The notes of cuts count, too.
    assert abs(30_000_005 - done.stdout_size.cut_bytes - (8 << 20)) <= 64 << 10
    assert len(log(session)) <= LOG_LIMIT_BYTES
    assert log(session).endswith("xlast\n\n")


def test_a_broken_connection_ends_nothing_and_no_output_is_lost(
    session: Session, env: Environment, cloud: FakeCloud, guest: Guest, tmp_path: Path
) -> None:
    sshd = cloud.machine(env).sshd

    class Cutting(type(told_of(session))):  # type: ignore[misc]
        def output(self, text: str) -> None:
            super().output(text)
            if "2" in text or "4" in text:
                threading.Thread(target=sshd.cut).start()

        def note(self, text: str) -> None:
            super().note(text)
            if "connecting again" in text:
                (guest.home / f"cut-{self.breaks()}").touch()

        def breaks(self) -> int:
            return sum("connecting again" in note for note in self.notes)

    script = """
    await() { until [ -e ../cut-$1 ]; do sleep 0.05; done; }
    echo 1; echo 2; await 1; echo 3; echo 4; await 2; echo 5; exit 4
    """
    directory = agents(tmp_path / "agent", script)
    progress = Cutting()
    done = run_agent(replace(session, progress=progress), env, AgentCommand(directory, "exec sh run.sh"))
    assert (done.exit_code, done.stdout) == (4, b"1\n2\n3\n4\n5\n")
    assert progress.breaks() >= 2
    assert [request["start"] for request in guest.agent_requests] == [True, *[False] * (len(guest.agent_requests) - 1)]


def test_the_agent_of_a_crashed_controller_is_followed(
    session: Session, env: Environment, guest: Guest, tmp_path: Path
) -> None:
    directory = agents(tmp_path / "agent", "echo once >> ../count; echo begun; sleep 1.5; echo done; exit 6")
    agent = AgentCommand(directory, "exec sh run.sh", identity="batch")

    class Crashing(type(told_of(session))):  # type: ignore[misc]
        def output(self, text: str) -> None:
            raise MemoryError

    stopped, guest.kill_agent = guest.kill_agent, lambda: None  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        run_agent(replace(session, progress=Crashing()), env, agent)
    guest.kill_agent = stopped  # type: ignore[method-assign]
    done = run_agent(session, session.environments.reread(env), agent)
    assert (done.exit_code, done.stdout) == (6, b"begun\ndone\n")
    assert (guest.home / "count").read_text() == "once\n"


def test_a_clock_that_was_set_back_gives_an_agent_no_more_time(
    session: Session, env: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float | None] = []
    run = Connection.run

    def noted(self: Connection, command: Any, **settings: Any) -> Any:
        if command == ["agent.py"]:
            limits.append(settings["timeout_seconds"])
        return run(self, command, **settings)

    monkeypatch.setattr(Connection, "run", noted)
    ahead = session.environments.update(env, agent_at=now() + timedelta(hours=3))
    limit = timedelta(minutes=1)
    run_agent(session, ahead, AgentCommand(agents(tmp_path / "agent", "echo 1"), "sh run.sh", limit, identity="batch"))
    assert limits[0] == pytest.approx(60 + module.STOPPING_SECONDS, abs=30)


def test_an_agent_that_was_never_started_is_started(
    session: Session, env: Environment, guest: Guest, tmp_path: Path
) -> None:
    crashed = session.environments.update(env, agent_at=env.created_at)
    agent = AgentCommand(agents(tmp_path / "agent", "echo 1"), "sh run.sh", identity="batch")
    assert run_agent(session, crashed, agent).stdout == b"1\n"


def test_an_operators_interruption_ends_the_agent(
    session: Session, env: Environment, guest: Guest, tmp_path: Path
) -> None:
    class Impatient(type(told_of(session))):  # type: ignore[misc]
        def output(self, text: str) -> None:
            raise KeyboardInterrupt

    directory = agents(tmp_path / "agent", "echo begun; exec sleep 1000")
    with pytest.raises(KeyboardInterrupt):
        run_agent(replace(session, progress=Impatient()), env, AgentCommand(directory, "exec sh run.sh"))
    assert guest.cgroup[-1] == "end"


def test_a_lost_machine_blames_no_agent_without_the_clouds_word(
    session: Session, env: Environment, cloud: FakeCloud, tmp_path: Path
) -> None:
    progress = Trigger(lambda: cloud.end_machine(env))
    directory = agents(tmp_path / "agent", "echo begun; exec sleep 1000")
    with pytest.raises(MachineLostError) as caught:
        run_agent(replace(session, progress=progress), env, AgentCommand(directory, "exec sh run.sh"))
    assert caught.value.cloud_words == ""


@pytest.mark.parametrize(
    ("limit", "questions"),
    [(timedelta(minutes=1), 1), (None, 2)],
    ids=["limit", "no-limit"],
)
def test_a_machine_that_lives_unreachable_is_the_agents_doing(
    session: Session,
    env: Environment,
    cloud: FakeCloud,
    clock: WaitingClock,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    limit: timedelta | None,
    questions: int,
) -> None:
    """A thousand seconds pass before each question to the cloud: long for an agent with a limit, short for others."""
    answers: list[bool | None] = []

    def asked(session: Session, environment: Environment) -> bool | None:
        clock.seconds += 1000
        answers.append(primary_runs(session, environment))
        return answers[-1]

    monkeypatch.setattr(module, "primary_runs", asked)
    progress = Trigger(lambda: lock_out(cloud.machine(env).sshd))
    directory = agents(tmp_path / "agent", "echo begun; exec sleep 1000")
    with pytest.raises(AgentError, match="cloud says that it runs") as caught:
        run_agent(replace(session, progress=progress), env, AgentCommand(directory, "exec sh run.sh", limit))
    assert caught.value.exit_code == 7
    assert answers == [True] * questions


@pytest.mark.parametrize(
    "answer",
    [b"q 0 0\n", b"o 5 x\n", b"x" * 100, b"o -5 3\nabc", b"x 0 2\n{}"],
    ids=["kind", "size", "line", "offset", "end"],
)
def test_an_unreadable_account_leaves_an_unknown_end(
    session: Session, env: Environment, guest: Guest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    def lie(call: Any) -> int:
        call.stdin()
        call.say(answer)
        return 0

    monkeypatch.setattr(guest, "_run_agent", lie)
    done = run_agent(session, env, AgentCommand(agents(tmp_path / "agent", ""), "true"))
    assert done.exit_code is None
    assert "not known how the agent ended" in done.problem


def test_a_failing_program_in_the_machine_is_not_retried_forever(
    session: Session, env: Environment, guest: Guest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def fail(call: Any) -> int:
        call.stdin()
        calls.append(1)
        call.say(stderr=b"fork: retry: Resource temporarily unavailable\n")
        return 254

    monkeypatch.setattr(guest, "_run_agent", fail)
    done = run_agent(session, env, AgentCommand(agents(tmp_path / "agent", ""), "true"))
    assert "not known how the agent ended" in done.problem
    assert len(calls) == module.PROGRAM_FAILURES


def test_a_connection_that_goes_silent_is_given_up_for_a_new_one(
    session: Session,
    env: Environment,
    guest: Guest,
    clock: WaitingClock,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_program = guest._run_agent
    calls: list[int] = []

    def silent_at_first(call: Any) -> int:
        calls.append(1)
        if len(calls) == 1:
            call.stdin()
            clock.seconds += 2 * module.SILENCE_SECONDS
            until(lambda: call.channel.closed)
            return 0
        return run_program(call)

    monkeypatch.setattr(guest, "_run_agent", silent_at_first)
    done = run_agent(session, env, AgentCommand(agents(tmp_path / "agent", "echo 1; exit 2"), "exec sh run.sh"))
    assert (done.exit_code, done.stdout) == (2, b"1\n")
    assert any("no sign of life" in note for note in told_of(session).notes)


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
    run_agent(session, env, AgentCommand(agents(tmp_path / "agent", ""), "true"))
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
    done = run_agent(session, env, AgentCommand(agents(tmp_path / "agent", ""), "exit 3"))
    assert (done.exit_code, done.timed_out) == (3, False)


def test_an_environment_destroyed_during_a_copy_stays_gone(
    session: Session, env: Environment, copies: list[Callable[[], object]], tmp_path: Path
) -> None:
    copies.append(lambda: session.environments.archive(env))
    with pytest.raises(UsageError, match="env has been destroyed"):
        run_agent(session, env, AgentCommand(agents(tmp_path / "agent", ""), "true"))
    assert not session.environments.directory(env.id).exists()


@pytest.fixture
def outage(session: Session, env: Environment, tmp_path: Path) -> tuple[Environment, AgentCommand]:
    """An agent that ended in time while its controller was away until long after its time limit."""
    agent = AgentCommand(agents(tmp_path / "agent", "echo 1; exit 3"), "exec sh run.sh", timedelta(minutes=5), "batch")
    run_agent(session, env, agent)
    current = session.environments.find(env.id)
    return session.environments.update(current, agent_at=now() - timedelta(hours=1)), agent


def test_a_late_controller_believes_that_an_agent_ended(
    session: Session, outage: tuple[Environment, AgentCommand], calls: list[Callable[[Call], int | None]]
) -> None:
    seconds: list[float] = []
    calls.append(lambda call: seconds.append(call.request["timeout_seconds"]))
    done = run_agent(session, *outage)
    assert (done.exit_code, done.timed_out, done.stdout) == (3, False, b"1\n")
    assert seconds == [module.STOPPING_SECONDS]


def test_a_machine_that_answers_slowly_is_asked_again(
    session: Session, outage: tuple[Environment, AgentCommand], calls: list[Callable[[Call], int | None]]
) -> None:
    calls.append(late)
    done = run_agent(session, *outage)
    assert (done.exit_code, done.timed_out, done.stdout) == (3, False, b"1\n")


def test_a_machine_that_never_answers_is_not_asked_forever(
    session: Session, outage: tuple[Environment, AgentCommand], guest: Guest, calls: list[Callable[[Call], int | None]]
) -> None:
    calls += [late] * 5
    assert run_agent(session, *outage).timed_out
    assert (len(calls), guest.cgroup[-1]) == (5 - module.LATE_CALLS, "end")


def test_a_machine_that_a_late_controller_misses_is_retried(
    session: Session,
    outage: tuple[Environment, AgentCommand],
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
    agent = AgentCommand(agents(tmp_path / "agent", script), "exec sh run.sh")
    assert run_agent(replace(session, progress=Trigger(outage)), env, agent).exit_code == 3
    assert answers == [None] * 3


@pytest.fixture
def crashed(session: Session, env: Environment, tmp_path: Path) -> tuple[Environment, AgentCommand]:
    """An agent whose controller crashed before it had started it."""
    agent = AgentCommand(agents(tmp_path / "agent", "echo 1"), "sh run.sh", timedelta(minutes=1), "batch")
    return session.environments.update(env, agent_at=now()), agent


def test_a_copy_shows_no_signs_of_life_and_is_not_given_up(
    session: Session,
    crashed: tuple[Environment, AgentCommand],
    copies: list[Callable[[], object]],
    clock: WaitingClock,
    checks: list[int],
) -> None:
    copies.append(lambda: stay_silent(clock, checks))
    assert run_agent(session, *crashed).stdout == b"1\n"
    assert told_of(session).notes == []


def test_a_copy_that_does_not_end_is_not_the_agents_timeout(
    session: Session, crashed: tuple[Environment, AgentCommand], guest: Guest, monkeypatch: pytest.MonkeyPatch
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
    crashed: tuple[Environment, AgentCommand],
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
    agent = AgentCommand(agents(tmp_path / "agent", ""), "exec sh run.sh", timedelta(minutes=1))
    with monkeypatch.context() as patched:
        patched.setattr(guest, "kill_agent", lambda: stay_silent(clock, checks))
        assert run_agent(session, env, agent).timed_out
    assert (told_of(session).notes, guest.cgroup) == ([], ["end"])
