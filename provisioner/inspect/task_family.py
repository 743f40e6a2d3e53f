"""Task families as Inspect tasks: `inspect eval provisioner/task_family -T family=PATH`."""

from __future__ import annotations

from pathlib import Path

from inspect_ai import Task, task
from inspect_ai.agent import AgentSubmit, as_solver, react
from inspect_ai.dataset import MemoryDataset
from inspect_ai.solver import Solver
from inspect_ai.tool import Tool, ToolSource, bash, python

from provisioner.errors import UsageError
from provisioner.inspect.absolute_arguments import absolute
from provisioner.inspect.failures import before_samples
from provisioner.inspect.family_samples import FamilySamples
from provisioner.inspect.scoring import SUBMIT, ScoringTools, begin, score_metr_task

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
