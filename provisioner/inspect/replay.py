"""Replays recorded runs of task families: `inspect eval provisioner/replay -T tasks_path=FILE`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import ChatMessageAssistant, ModelOutput, execute_tools
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.tool import ToolCall, bash, python
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from provisioner import strict_yaml
from provisioner.errors import UsageError
from provisioner.inspect.failures import before_samples
from provisioner.inspect.private import absolute
from provisioner.inspect.scoring import SUBMIT, ScoringTools, begin, check_expected_score
from provisioner.inspect.task_family import FamilySamples
from provisioner.validation import lines_of, listed

MAXIMUM_BYTES = 64 << 20
COMMAND_SECONDS = 120
# What older recordings call the parameters of Inspect's tools.
_PARAMETERS = {("bash", "cmd"): "command", ("bash", "bash_command"): "command", (SUBMIT, "submission"): "answer"}


class Call(BaseModel):
    """A recorded call of a tool. Its result is what came of it then, and is not compared."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: str
    arguments: dict[str, Any] = {}


class Action(BaseModel):
    """What the model said, and the tools that it called with it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    message: str = ""
    calls: tuple[Call, ...] = ()


class Run(BaseModel):
    """A recorded run.

    Args:
        run_id: the sample's id.
        task_family: the family's name; its directory lies beside the file, or in `families_path`.
        expected_score: None if a person had to score.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    run_id: str | int
    task_family: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")]
    task_name: str
    actions: tuple[Action, ...]
    expected_score: float | None = None


class Recording(BaseModel):
    """A file of recorded runs, in the form of METR's own bridge to Inspect."""

    model_config = ConfigDict(frozen=True, extra="ignore")

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
        state.tools.extend([bash(timeout=COMMAND_SECONDS), python(timeout=COMMAND_SECONDS)])
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
