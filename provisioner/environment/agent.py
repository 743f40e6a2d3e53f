"""Runs an agent in a machine, detached: a broken connection ends nothing, and the controller connects again.

guest/agent.py starts the agent, keeps its output for a while, and ends it at its time limit; this module follows it.
The controller's own clock ends an agent, too, should the machine not do so.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import tarfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import IO

from provisioner.base.clock import elapsed, now
from provisioner.base.errors import (
    CommandTimeoutError,
    HostError,
    InfrastructureError,
    LivenessLostError,
    MachineLostError,
    TaskError,
    UsageError,
)
from provisioner.base.models import Environment
from provisioner.base.printable import last_lines
from provisioner.base.progress import best_effort
from provisioner.base.signals import wait
from provisioner.clouds.guest_files import SENT
from provisioner.copying.copy_program import TOP
from provisioner.copying.transfer import packed, send_input
from provisioner.driver.agent_frames import AgentEnd, AgentFrames, FrameError
from provisioner.driver.output_tee import OutputTee
from provisioner.environment.outcomes import attributing_loss, primary_runs
from provisioner.family.files import digest_archive
from provisioner.machines.claims import environment_lock
from provisioner.machines.connect import connect
from provisioner.session import Session
from provisioner.ssh.connection import Connection
from provisioner.ssh.exchange import NO_OUTPUT, BoundedBuffer, Completed, StreamSize
from provisioner.store.environments import refuse_ending

HOME = "/home/agent"
SCAFFOLDING = f"{HOME}/scaffolding"
PROGRAM = """
import sys
sys.path.insert(0, "/usr/lib/provisioner/guest")
import agent
sys.exit(agent.main())
"""
CGROUP = "/usr/lib/provisioner/guest/agent_cgroup.sh"
# How long the machine may take, after the agent's time limit, to end an agent that resists.
STOPPING_SECONDS = 30.0
# How long a machine may be unreachable after the agent's time limit, at which it ends the agent by itself.
UNREACHABLE_SECONDS = 300.0
# How long a machine that runs may be unreachable at a stretch if the agent has no time limit.
UNREACHABLE_WITHOUT_LIMIT_SECONDS = 1800.0
# guest/agent.py shows a sign of life every ten seconds.
SILENCE_SECONDS = 60.0
# The pauses before each new connection; the last one repeats.
PAUSES_SECONDS = (0.5, 2.0, 5.0, 15.0)
# How often the program in the machine may end without having said how the agent ended.
PROGRAM_FAILURES = 5
# After this many calls that begin after the agent's time limit and outlast STOPPING_SECONDS, the agent counts as one
# that resists. The first may be slow, as it also passes on the output of an outage.
LATE_CALLS = 2


@dataclass(frozen=True)
class AgentResult:
    """Holds how an agent ended.

    Args:
        exit_code: -1 if a signal ended it; None if its time ran out, or if its end is not known.
        timed_out: whether its time ran out.
        stdout, stderr: bounded.
        stdout_size, stderr_size: how much the agent wrote, and how much of it was cut out.
    """

    exit_code: int | None
    timed_out: bool
    stdout: bytes
    stderr: bytes
    stdout_size: StreamSize = NO_OUTPUT
    stderr_size: StreamSize = NO_OUTPUT

    @property
    def problem(self) -> str:
        """Says why it is not known how the agent ended; empty if that is known, or its time ran out."""
        if self.exit_code is not None or self.timed_out:
            return ""
        return (
            "It is not known how the agent ended: the program that watches over it was ended, or its machine restarted."
        )


@dataclass(frozen=True)
class AgentCommand:
    """Names an agent: its directory on the controller and the command that starts it in the machine.

    Args:
        directory: replaces an earlier scaffolding.
        command: the command that the agent's login shell runs.
        limit: how long it may run; None for as long as the environment lives.
        identity: the same for each call that is to follow one agent instead of starting another; None: a new one.
    """

    directory: Path
    command: str
    limit: timedelta | None = None
    identity: str | None = None


def require_directory(agent: Path) -> None:
    """Raises UsageError if an agent's directory does not exist or is not a directory."""
    if not agent.is_dir():
        problem = "is not a directory" if agent.exists() else "does not exist"
        raise UsageError(
            f"The agent's directory {agent} {problem}.",
            hint="Its files are copied; --command says how it starts there.",
        )


def run_agent(session: Session, environment: Environment, agent: AgentCommand) -> AgentResult:
    """Copies an agent to /home/agent/scaffolding and runs it there as user agent, by `bash -lc COMMAND`.

    If a process before this one has started the agent with this identity, it is followed from the beginning of the
    output that the machine still has.

    Raises:
        UsageError: there is no such directory, or the environment's destruction has begun, perhaps during the copy.
        TaskError: the agent could not be copied.
        HostError: there is no room to pack its files, or a disk fails.
        AgentError: after it had begun, its machine was switched off from within, or could no longer be reached.
        MachineLostError: the machine was lost, and the agent is not to blame.
    """
    require_directory(agent.directory)
    session.environments.refuse_destroyed(environment.id)
    environment = session.environments.reread(environment)
    refuse_ending(environment)
    log = session.environments.logs(environment.id) / "agent.log"
    with (
        attributing_loss(session, environment),
        session.cast(environment, "agent", agent.command) as cast,
        OutputTee(session.redactor, session.output, log, heading=f"$ {agent.command}", cast=cast) as tee,
    ):
        return _Following(session, environment, agent, tee).finish()


def _digest(packed_agent: IO[bytes]) -> str:
    """Returns the hash of a packed agent's files, and goes back to the beginning."""
    try:
        with tarfile.open(fileobj=packed_agent, mode="r:") as archive:
            files = digest_archive(archive, TOP)
        packed_agent.seek(0)
    except OSError as error:
        raise HostError(f"The packed agent cannot be read: {error.strerror or error}.") from error
    return files


class _Following:
    """Follows one agent across connections."""

    def __init__(self, session: Session, environment: Environment, agent: AgentCommand, tee: OutputTee) -> None:
        self._plain_session = session
        self._session = replace(session, check=self._check)
        self._environment = environment
        self._agent = agent
        self._identity = agent.identity or secrets.token_hex(8)
        self._listeners = {"o": tee.stream(), "e": tee.stream()}
        self._kept = {"o": BoundedBuffer(), "e": BoundedBuffer()}
        self._frames = AgentFrames(self._output)
        # When the program in the machine was last heard; None while no call listens to it.
        self._heard_at: float | None = None
        # When the machine was last reached, or was last known to be no more out of reach than the cloud.
        self._reached_at = time.monotonic()
        self._is_new = agent.identity is None or environment.agent_at is None
        self._deadline = self._deadline_from(now() if self._is_new else environment.agent_at or now())
        self._began_to_follow_at = time.monotonic()
        self._is_copied = False
        self._failures = 0
        self._late_calls = 0

    def _deadline_from(self, begun_at: datetime) -> float | None:
        """Returns when the controller ends an agent by itself, in time.monotonic() seconds."""
        if self._agent.limit is None:
            return None
        left = self._agent.limit - elapsed(begun_at, now())
        return time.monotonic() + left.total_seconds() + STOPPING_SECONDS

    def finish(self) -> AgentResult:
        """Follows the agent until it has ended, on as many connections as that takes."""
        pauses = iter(PAUSES_SECONDS)
        while True:
            try:
                with connect(self._session, self._environment, "primary") as connection:
                    end = self._follow(connection)
                if end:
                    self._record_end(end)
                    return self._result(end)
            except LivenessLostError:
                raise
            except InfrastructureError as error:  # the connection broke, or the cloud could not be asked
                if end := self._frames.end:
                    self._record_end(end)
                    return self._result(end)
                self._require_reachable(error)
                self._session.progress.note(f"{error.message} The agent works on; connecting again.")
            wait(next(pauses, PAUSES_SECONDS[-1]), self._plain_session.check)

    def _follow(self, connection: Connection) -> AgentEnd | None:
        """Follows the agent on one connection; returns None if it has to be tried again."""
        if self._is_new:
            self._copy(connection)
        end = self._listen(connection)
        if self._has_to_be_copied():  # a process before this one got no further
            self._copy(connection)
            end = self._listen(connection)
        return end

    def _has_to_be_copied(self) -> bool:
        return self._frames.unknown and not self._frames.started and not self._is_copied

    def _listen(self, connection: Connection) -> AgentEnd | None:
        """Calls the program in the machine, and ends the agent if that takes too long or this process is stopped."""
        is_late = self._deadline is not None and time.monotonic() > self._deadline - STOPPING_SECONDS
        try:
            return self._call(connection)
        except TimeoutError:
            if self._frames.end:
                return self._frames.end
            self._late_calls += 1
            if is_late and self._late_calls < LATE_CALLS:
                self._session.progress.note("The machine has not said in time how the agent ended; asking again.")
                return None
            stop(connection)
            return AgentEnd(timed_out=True)
        except FrameError as error:
            self._session.progress.note(f"The machine's account of the agent cannot be read: {error}.")
            return AgentEnd()
        except InfrastructureError:
            raise
        except (KeyboardInterrupt, Exception):  # the operator stops it, or a listener fails
            with contextlib.suppress(InfrastructureError), self._session.shield():
                stop(connection)
            raise

    def _copy(self, connection: Connection) -> None:
        """Copies the agent, as user agent: an earlier one may have planted a link that would lead root elsewhere."""
        try:
            with packed(lambda archive: archive.add(self._agent.directory.resolve(), arcname=TOP)) as spool:
                files = _digest(spool)
                sent = send_input(connection, spool, "replace", SCAFFOLDING, user="agent")
        except CommandTimeoutError as error:
            raise TaskError("The agent could not be copied.", details=error.message) from error
        if sent.exit_code != 0:
            raise TaskError(
                "The agent could not be copied.", details=last_lines(sent.stderr.decode(errors="replace"), 1000)
            )
        # Before it starts: from here on a fresh machine could be a second chance. The copy may have taken an hour, in
        # which others may have changed the record, or begun to destroy the environment.
        with environment_lock(self._session, self._environment) as current:
            self._environment = self._session.environments.update(current, agent_at=now(), agent_files=files)
        self._is_new, self._is_copied = False, True
        self._reached_at = time.monotonic()
        self._deadline = self._deadline_from(now())

    def _record_end(self, end: AgentEnd) -> None:
        """Records how the agent ended. Its result counts even if that fails, as when it was destroyed meanwhile."""
        with (
            best_effort(self._session.progress, f"Recording the end of the agent in {self._environment.id}"),
            environment_lock(self._session, self._environment) as current,
        ):
            self._session.environments.update(current, agent_ended_at=now(), agent_exit_code=end.exit_code)

    def _call(self, connection: Connection) -> AgentEnd | None:
        """Calls the program in the machine, which starts the agent if it may and has not."""
        limit = self._agent.limit
        request = {
            "id": self._identity,
            "start": self._is_copied and not self._frames.started,
            "command": self._agent.command,
            "limit_seconds": limit.total_seconds() if limit else None,
            "offsets": self._frames.offsets,
            "root": "/",
            "user": "agent",
            "home": HOME,
        }
        self._frames.reconnect()
        self._heard_at = time.monotonic()
        # Until the deadline, and never too short for an answer.
        seconds = None if self._deadline is None else max(self._deadline - self._heard_at, STOPPING_SECONDS)
        try:
            done = connection.run(
                ["agent.py"],
                program=PROGRAM,
                stdin=json.dumps(request).encode(),
                on_stdout=self._receive,
                timeout_seconds=seconds,
                limit_bytes=2000,
                part="agent",
            )
        finally:
            self._heard_at = None  # other commands show no signs of life
        if self._frames.end or self._has_to_be_copied():
            return self._frames.end
        self._failures += 1
        if self._failures < PROGRAM_FAILURES:
            return None
        said = last_lines(done.stderr.decode(errors="replace"), 300)
        self._session.progress.note(f"The program that follows the agent failed in the machine: {said}")
        return AgentEnd()

    def _receive(self, data: bytes) -> None:
        self._frames.feed(data, time.monotonic() - self._began_to_follow_at)
        self._heard_at = self._reached_at = time.monotonic()

    def _output(self, kind: str, data: bytes) -> None:
        self._kept[kind].write(data)
        self._listeners[kind](data)

    def _check(self) -> None:
        self._plain_session.check()
        if self._heard_at is not None and time.monotonic() - self._heard_at > SILENCE_SECONDS:
            raise MachineLostError("The machine has sent no sign of life for a minute.")

    def _require_reachable(self, error: InfrastructureError) -> None:
        """Raises the error unless the machine may run and may still be reached in time."""
        running = primary_runs(self._session, self._environment)
        if running is None:  # an outage of the controller's own, in which the machine may well be reachable
            self._reached_at = time.monotonic()
        deadline = self._reached_at + UNREACHABLE_WITHOUT_LIMIT_SECONDS
        if self._deadline is not None:
            # A controller that comes back after an outage has as long as one that never was away.
            deadline = max(self._deadline, self._began_to_follow_at) + UNREACHABLE_SECONDS
        if time.monotonic() > deadline or running is False:
            raise error

    def _result(self, end: AgentEnd) -> AgentResult:
        return AgentResult(
            end.exit_code,
            end.timed_out,
            self._kept["o"].value(),
            self._kept["e"].value(),
            self._size("o"),
            self._size("e"),
        )

    def _size(self, kind: str) -> StreamSize:
        """Returns a stream's size, with what the machine cut out before this process read it, and our notes of that."""
        total = self._frames.offsets[kind]
        return StreamSize(total, min(total, self._frames.lost_bytes[kind] + self._kept[kind].size.cut_bytes))


def stop(connection: Connection) -> None:
    """Ends all processes that agents have started, and lets no new ones in.

    Raises:
        MachineLostError: they do not end, or the connection broke.
    """
    program = (SENT / "agent_end.py").read_text() + "\n\nmain()\n"
    _require("The agent's processes could not be ended", partial(connection.run, ["agent_end.py"], program=program))


def readmit(connection: Connection) -> None:
    """Lets the agent's processes in again, after `stop`.

    Raises:
        MachineLostError: the machine does not let them in, or the connection broke.
    """
    _require("The agent's processes could not be let in again", partial(connection.run, ["sh", CGROUP, "reopen"]))


def _require(problem: str, run: Callable[..., Completed]) -> None:
    try:
        done = run(timeout_seconds=STOPPING_SECONDS)
    except TimeoutError as error:
        raise MachineLostError(f"{problem} in time.") from error
    if done.exit_code != 0:
        said = last_lines(done.stderr.decode(errors="replace"), 300)
        raise MachineLostError(f"{problem}: {said}")
