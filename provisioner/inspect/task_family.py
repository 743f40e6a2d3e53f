"""Task families as Inspect tasks, run anew or replayed from recorded runs.

`inspect eval provisioner/task_family -T family=PATH`, or `inspect eval provisioner/replay -T tasks_path=FILE`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from inspect_ai import Task, task
from inspect_ai.agent import AgentSubmit, as_solver, react
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import ChatMessageAssistant, ModelOutput, execute_tools
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.tool import Tool, ToolCall, ToolSource, bash, python
from inspect_ai.util import SandboxEnvironmentSpec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from provisioner.base import strict_yaml
from provisioner.base.errors import UsageError
from provisioner.base.models import SetupData
from provisioner.base.signals import Interrupts
from provisioner.base.validation import lines_of, listed
from provisioner.family.check import refuse_mistakes
from provisioner.family.loader import TaskFamily, load_family, refuse_env_file_inside
from provisioner.images import build
from provisioner.inspect.blocking import reporting
from provisioner.inspect.configuration import Configuration, written
from provisioner.inspect.evals import Origin, absolute
from provisioner.inspect.failures import before_samples, full_message
from provisioner.inspect.sample import CHECKED, open_session
from provisioner.inspect.scoring import SUBMIT, ScoringTools, begin, check_expected_score, score_metr_task
from provisioner.session import Session


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
        with before_samples(), full_message():
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
        with before_samples(), full_message(session.redactor), interruptible(session) as watched:
            with reporting(session.progress, "its image is ready"):
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
    """Lets Ctrl-C end work that keeps the event loop's thread, which cleans up first.

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


MAXIMUM_BYTES = 64 << 20
REPLAYED_SECONDS = 120
# What older recordings call the parameters of Inspect's tools.
_PARAMETERS = {("bash", "cmd"): "command", ("bash", "bash_command"): "command", (SUBMIT, "submission"): "answer"}


class _Recorded(BaseModel):
    """A part of a file of recorded runs, of which METR's bridge may know more keys."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Call(_Recorded):
    """A recorded call of a tool. Its result is what came of it then, and is not compared."""

    name: str
    arguments: dict[str, Any] = {}


class Action(_Recorded):
    """What the model said, and the tools that it called with it."""

    message: str = ""
    calls: tuple[Call, ...] = ()


class Run(_Recorded):
    """A recorded run.

    Args:
        run_id: the sample's id.
        task_family: the family's name; its directory lies beside the file, or in `families_path`.
        expected_score: None if a person had to score.
    """

    run_id: str | int
    task_family: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")]
    task_name: str
    actions: tuple[Action, ...]
    expected_score: float | None = None


class Recording(_Recorded):
    """A file of recorded runs, in the form of METR's own bridge to Inspect."""

    name: str = "replay"
    tasks: tuple[Run, ...]


@absolute("tasks_path", "families_path", "secrets_env_path")
@task
def replay(
    tasks_path: str,
    families_path: str = "",
    secrets_env_path: str = "",
    cloud: str = "local",
    ttl: str = "",
    budget: float | str | None = "",
) -> Task:
    """Does again what recorded agents did, and compares the scores.

    Args:
        tasks_path: a YAML file of recorded runs.
        families_path: the directory that has the families; empty for the file's own.
        secrets_env_path, cloud, ttl, budget: as for task_family.
    """
    path = Path(tasks_path).expanduser().absolute()
    with before_samples():
        recording = load(path)
    parent = Path(families_path).expanduser().absolute() if families_path else path.parent
    families: dict[str, FamilySamples] = {}
    samples: list[Sample] = []
    for run in recording.tasks:
        if run.task_family not in families:
            named = [other.task_name for other in recording.tasks if other.task_family == run.task_family]
            families[run.task_family] = FamilySamples(
                parent / run.task_family, secrets_env_path, cloud, ttl, named, budget=budget
            )
        family = families[run.task_family]
        actions = [action.model_dump() for action in run.actions]
        samples.append(family.sample(run.task_name, str(run.run_id), actions, run.expected_score))
    return Task(
        name=recording.name,
        dataset=MemoryDataset(samples, name=recording.name),
        solver=replay_agent(),
        setup=begin(),
        scorer=check_expected_score(),
    )


def load(path: Path) -> Recording:
    """Reads a file of recorded runs.

    Raises:
        UsageError: it cannot be read or is not valid; the message has one line per problem.
    """
    value = strict_yaml.read(path, "The file of recorded runs", MAXIMUM_BYTES)
    try:
        return Recording.model_validate(value)
    except ValidationError as error:
        raise UsageError(f"{path} is not valid:{listed(lines_of(error))}") from None


@solver
def replay_agent() -> Solver:
    """Returns the solver that says and does what was recorded, up to the submission."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        state.tools.extend([bash(timeout=REPLAYED_SECONDS), python(timeout=REPLAYED_SECONDS)])
        state.tools.extend(await ScoringTools().tools())
        for number, recorded in enumerate(state.metadata["actions"]):
            action = Action.model_validate(recorded)
            calls = [tool_call(call, f"{number}-{index}") for index, call in enumerate(action.calls)]
            message = ChatMessageAssistant(content=action.message, tool_calls=calls, model="replay", source="generate")
            state.output = ModelOutput.from_message(message)
            state.messages.append(message)
            if any(call.function == SUBMIT for call in calls):
                break
            if calls:
                done = await execute_tools([message], state.tools)
                state.messages.extend(done.messages)
        return state

    return solve


def tool_call(call: Call, identity: str) -> ToolCall:
    """Returns the call as Inspect makes it today."""
    arguments = {_PARAMETERS.get((call.name, name), name): value for name, value in call.arguments.items()}
    return ToolCall(id=identity, function=call.name, arguments=arguments)
