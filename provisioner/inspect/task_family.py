"""Task families as Inspect tasks: `inspect eval provisioner/task_family -T family=PATH`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from inspect_ai import Task, task
from inspect_ai.agent import AgentSubmit, as_solver, react
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.solver import Solver
from inspect_ai.tool import Tool, ToolSource, bash, python
from inspect_ai.util import SandboxEnvironmentSpec

from provisioner.errors import UsageError
from provisioner.family.check import refuse_mistakes
from provisioner.family.loader import TaskFamily, load_family, refuse_env_file_inside
from provisioner.images import build
from provisioner.inspect.configuration import Configuration, written
from provisioner.inspect.failures import before_samples, told_in_full
from provisioner.inspect.listener import told
from provisioner.inspect.origin import Origin
from provisioner.inspect.private import absolute
from provisioner.inspect.sample import CHECKED, open_session
from provisioner.inspect.scoring import SUBMIT, ScoringTools, begin, score_metr_task
from provisioner.models import SetupData
from provisioner.session import Session
from provisioner.signals import Interrupts


class FamilySamples:
    """A family whose image is built, so that its tasks are known.

    Args:
        directory: the family's directory.
        secrets_env_path: the file with its secrets; empty for none.
        cloud, ttl, fork: as in the configuration.
        budget: as in the configuration; "" for none, as an empty argument of Inspect's command line is None.
        named: the tasks that are to be run; none for all.

    Raises:
        PreparationError: the family is not valid, surely fails, or has no such task.
        ProvisionerError: its image could not be built.
    """

    def __init__(
        self,
        directory: Path,
        secrets_env_path: str,
        cloud: str,
        ttl: str,
        named: Sequence[str] = (),
        fork: str = "none",
        budget: float | str | None = "",
    ) -> None:
        with before_samples(), told_in_full():
            self.family: TaskFamily = load_family(directory.expanduser().absolute())
            secrets = str(Path(secrets_env_path).expanduser().absolute()) if secrets_env_path else ""
            if secrets:
                refuse_env_file_inside(self.family, Path(secrets))
            common = {
                "family": str(self.family.directory),
                "cloud": cloud,
                "ttl": ttl,
                "env_file": secrets,
                "fork": fork,
                **({} if budget == "" else {"budget": budget}),
            }
            self._configuration = partial(_configuration, common)
            session = open_session(self._configuration("any"), Origin(self.family.name))
            # Once: it reads the whole family. Of several names, the text or the built image tells which are unknown.
            task = named[0] if len(set(named)) == 1 else None
            checked = refuse_mistakes(self.family, task, session.variables)
            if checked.tasks is not None:
                self._refuse_unknown(named, checked.tasks)
            CHECKED.add((self.family.directory, secrets))
        # Inspect makes tasks in its event loop's own thread, and must know their samples before it continues.
        with before_samples(), told_in_full(session.redactor), interruptible(session) as watched:
            with told(session.progress, "its image is ready"):
                self._setup: SetupData = build.family_image(watched, self.family)[1]
            self._refuse_unknown(named, self._setup.tasks)
        self.tasks = list(named) or sorted(self._setup.tasks)

    def _refuse_unknown(self, named: Sequence[str], known: Collection[str]) -> None:
        if unknown := [name for name in named if name not in known]:
            listed = ", ".join(sorted(known))
            raise UsageError(f"{self.family.name} has no task {', '.join(unknown)}. It has {listed}.")

    def sample(
        self, task: str, identity: str = "", actions: Sequence[Any] = (), expected_score: float | None = None
    ) -> Sample:
        """Returns the sample of one task.

        Args:
            identity: the sample's id; empty for the task's name.
            actions, expected_score: of a replay.
        """
        data = self._setup.tasks[task]
        return Sample(
            id=identity or task,
            input=data.instructions,
            metadata={
                "task_name": task,
                "task_family": self.family.name,
                "actions": list(actions),
                "expected_score": expected_score,
                "instructions": data.instructions,
                "permissions": list(data.permissions),
                "provisioner": {
                    "has_aux_vm": data.aux_vm_spec is not None,
                    "has_intermediate_score": self._setup.has_intermediate_score,
                    "scoring_visible_to_agent": self.family.manifest.scoring(task).visible_to_agent,
                },
            },
            sandbox=SandboxEnvironmentSpec("provisioner", self._configuration(task)),
        )


@contextlib.contextmanager
def interruptible(session: Session) -> Iterator[Session]:
    """Has Ctrl-C end work that keeps the event loop's thread, and lets it clean up.

    The loop's own handler would only take note of a first Ctrl-C, and act once the work is done.

    Returns:
        the session for that work.
    """
    if threading.current_thread() is not threading.main_thread():
        yield session
        return
    interrupts = Interrupts(session.progress.note)
    with interrupts.installed():
        yield replace(session, shield=interrupts.shield)


def _configuration(common: Mapping[str, Any], task: str) -> Configuration:
    return written({**common, "task": task}, "The configuration by the task's arguments")


COMMAND_SECONDS = 180


@absolute("family", "secrets_env_path")
@task
def task_family(
    family: str = "",
    task: str | list[str] = "",
    secrets_env_path: str = "",
    cloud: str = "local",
    ttl: str = "",
    nan_is_zero: bool = True,
    fork: str = "none",
    budget: float | str | None = "",
) -> Task:
    """Runs a task family's tasks, each sample in virtual machines of its own.

    Args:
        family: the family's directory; it must be given.
        task: one of its tasks, or several with commas, of which Inspect's command line makes a list; empty for all.
        secrets_env_path: the file with its secrets, which reach the family's code and no log.
        cloud: `local` or `aws`.
        ttl: the machines' time to live; empty: by the sample's time limit.
        nan_is_zero: whether a score of NaN counts as 0.
        fork: `epochs` has the epochs of a sample start as copies of the one that comes up first.
        budget: US dollars for all samples and their images; "" for the standing budgets alone.
    """
    with before_samples():
        if not family:
            raise UsageError(
                "The task provisioner/task_family needs a family.", hint="Name its directory: -T family=PATH"
            )
    # The command line reads arguments as YAML: a name may have become a number.
    given = task if isinstance(task, list) else [task]
    named = [name.strip() for names in given for name in str(names).split(",") if name.strip()]
    samples = FamilySamples(Path(family), secrets_env_path, cloud, ttl, named, fork, budget)
    return Task(
        name=samples.family.name,
        version=samples.family.manifest.version or 0,
        dataset=MemoryDataset([samples.sample(name) for name in samples.tasks], name=samples.family.name),
        solver=_agent(),
        setup=begin(),
        scorer=score_metr_task(nan_is_zero),
    )


def _agent() -> Solver:
    """Returns the agent that works unless --solver names another."""
    tools: list[Tool | ToolSource] = [bash(timeout=COMMAND_SECONDS), python(timeout=COMMAND_SECONDS), ScoringTools()]
    return as_solver(react(tools=tools, submit=AgentSubmit(name=SUBMIT, keep_in_messages=True)))
