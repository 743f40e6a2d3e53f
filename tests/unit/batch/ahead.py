"""Runs of a batch on the fake cloud, each in a thread, whose agents work until they are let go."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from provisioner.batch import workflow
from provisioner.batch.attempts import Attempt
from provisioner.batch.live_status import ActiveRun
from provisioner.batch.results import WAITING, Row
from provisioner.batch.steps import Step
from provisioner.batch.suite import Run, Suite
from provisioner.batch.turns import Turn, Turns
from provisioner.environment.agent import AgentResult
from provisioner.family.loader import TaskFamily
from provisioner.machines.create import create_machines
from provisioner.models import Environment
from provisioner.session import Session
from provisioner.version import __version__
from tests.unit.fakes.world import Told

SUITE = Suite.model_validate(
    {
        "name": "s", "families": [{"path": "fam"}], "concurrency": 1, "ahead": 1,
        "agents": [{"name": "solver", "directory": ".", "command": "true"}], "limits": {"ttl": "1h"},
    }
)  # fmt: skip
HOUR = timedelta(hours=1)
PATIENCE_SECONDS = 30.0


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def once(_name: str, _kind: type[Step], work: Callable[[], Step]) -> Step:
    return work()


class Progress(Told):
    def phase_finished(self, name: str, seconds: float) -> None:
        self.phases.append(name)


@dataclass
class Case:
    """A run in a thread, as a worker has it."""

    run: Run
    session: Session
    turn: Turn
    active: ActiveRun
    attempts: list[Attempt] = field(default_factory=list)
    row: Row | None = None
    error: BaseException | None = None

    @property
    def waits(self) -> bool:
        assert isinstance(self.session.progress, Progress)
        return self.session.progress.phases[-1:] == [f"{WAITING}..."]

    def record(self) -> Environment:
        return self.session.environments.find(self.attempts[-1].id)


@dataclass
class Batch:
    """Runs of a batch in one process, whose agents work until they are let go."""

    session: Session
    fam: TaskFamily
    turns: Turns
    agents: list[str] = field(default_factory=list)
    most: int = 0
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    creating: threading.Lock = field(default_factory=threading.Lock)
    threads: list[threading.Thread] = field(default_factory=list)

    def work(self, session: Session, environment: Environment, _: Any) -> AgentResult:
        """Stands in for an agent."""
        self.agents.append(environment.id)
        self.most = max(self.most, len(self.agents))
        while not self.go.acquire(timeout=0.02):
            session.check()
        self.agents.remove(environment.id)
        return AgentResult(exit_code=0, timed_out=False, stdout=b"", stderr=b"")

    def create(self, session: Session, environment: Environment) -> Environment:
        with self.creating:
            [made] = create_machines(session, [environment])
            return made

    def case(self, number: int) -> Case:
        run = Run(
            key=f"fam/main/solver/{number}", family="/fam", task="main", agent="solver", repetition=number
        )  # fmt: skip
        active = ActiveRun(f"b-1/{run.key}")
        session = replace(self.session, progress=Progress(), check=active.check, shield=active.shield)
        return Case(run, session, Turn(self.turns), active)

    def attempt(self, case: Case, number: int = 1) -> Attempt:
        attempt = Attempt(
            session=case.session, batch="b-1", suite=SUITE, directory=Path(), run=case.run, family=self.fam, allowed=(),
            number=number, create=self.create, turn=case.turn,
        )  # fmt: skip
        case.attempts.append(attempt)
        return attempt

    def start(self, number: int) -> Case:
        case = self.case(number)

        def work() -> None:
            try:
                case.row = workflow.run_workflow(
                    case.run, 2, lambda number, _: self.attempt(case, number), once, __version__
                )
            except BaseException as error:
                case.attempts[-1].end()
                case.error = error
            finally:
                case.turn.release()

        self.threads.append(threading.Thread(target=work))
        self.threads[-1].start()
        return case

    def finish(self, agents: int = 1) -> None:
        for _ in range(agents):
            self.go.release()

    def wait(self) -> None:
        for thread in self.threads:
            thread.join(PATIENCE_SECONDS)
            assert not thread.is_alive()
