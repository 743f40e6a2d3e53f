"""The suite file: what to run, with what, how often, where and for how much. Read and checked here; runs nothing."""

from __future__ import annotations

import fnmatch
import glob
import os
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from provisioner.destinations import parse_destination
from provisioner.errors import UsageError
from provisioner.limits import DEFAULT_LIMIT, SHORTEST, checked_limit, parse_duration, words
from provisioner.models import Record

MAXIMUM_RUNS = 10_000
MAXIMUM_BYTES = 1 << 20

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
Duration = Annotated[str, Field(description="As 30m, 4h or 1h30m.")]


class Part(BaseModel):
    """A part of a suite file: frozen, and without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class FamilyEntry(Part):
    """Families and tasks of them.

    Args:
        path: directories of task families, as a glob relative to the suite file.
        tasks: globs of their tasks' names.
    """

    path: str = Field(min_length=1)
    tasks: tuple[str, ...] = ("*",)


class Agent(Part):
    """What works on the tasks.

    Args:
        directory: relative to the suite file.
        command: what starts it there.
    """

    name: Name
    directory: str = Field(min_length=1)
    command: str = Field(min_length=1)


class Submission(Part):
    """What is scored in an agent's place."""

    name: Name
    text: str


class Limits(Part):
    """How long things may take.

    Args:
        ttl: an environment, at most.
        agent: an agent; then it is stopped, and what it has left is scored as a time-out.
    """

    ttl: Duration = words(DEFAULT_LIMIT)
    agent: Duration = "1h"

    @field_validator("ttl", "agent")
    @classmethod
    def _is_a_duration(cls, value: str, info: ValidationInfo) -> str:
        try:
            duration = parse_duration(value)
            checked_limit(duration if info.field_name == "ttl" else max(duration, SHORTEST))
        except UsageError as error:
            raise ValueError(error.message) from error
        return value


class Suite(Part):
    """A suite file.

    Args:
        families: what to run.
        agents, submissions: with what; at least one of either.
        repetitions: how often each.
        cloud, regions, spot: where.
        concurrency: environments at once.
        budget: US dollars for the whole batch; None for the standing budgets alone.
        retries: of a run that failed by no fault of its own.
        allow: what environments without internet may reach, HOST:PORT.
        env_file: the tasks' secrets, relative to the suite file.
    """

    name: Name
    families: tuple[FamilyEntry, ...] = Field(min_length=1)
    agents: tuple[Agent, ...] = ()
    submissions: tuple[Submission, ...] = ()
    repetitions: int = Field(default=1, ge=1, le=1000)
    cloud: str = "local"
    regions: tuple[str, ...] = ()
    spot: bool = False
    limits: Limits = Limits()
    concurrency: int = Field(default=2, ge=1, le=1000)
    budget: Decimal | None = Field(default=None, ge=0)
    retries: int = Field(default=2, ge=0, le=10)
    allow: tuple[str, ...] = ()
    env_file: str | None = None

    @model_validator(mode="after")
    def _has_work(self) -> Suite:
        names = [*(one.name for one in self.agents), *(one.name for one in self.submissions)]
        if not names:
            raise ValueError("it names neither agents nor submissions")
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two agents or submissions are called {', '.join(twice)}")
        return self

    @field_validator("allow")
    @classmethod
    def _are_destinations(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            try:
                parse_destination(text)
            except UsageError as error:
                raise ValueError(error.message) from error
        return value


class Run(Record):
    """One run of a batch.

    Args:
        key: the same for the same run of the same suite: family, task, agent or submission, repetition.
        family: its directory.
        agent: name of the agent or submission.
    """

    key: str
    family: str
    task: str
    agent: str
    repetition: int


def load_suite(path: Path) -> Suite:
    """Reads a suite file.

    Raises:
        UsageError: it cannot be read, or is not valid; the message names the place.
    """
    try:
        if path.stat().st_size > MAXIMUM_BYTES:
            raise UsageError(f"The suite file {path} is larger than 1 MiB.")
        data = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UsageError(f"The suite file {path} cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"The suite file {path} is not YAML: {error}") from error
    try:
        suite = Suite.model_validate(data)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"]) or "the file"
        raise UsageError(
            f"The suite file {path} is not valid: {where}: {problem['msg']}",
            hint="`provisioner batch schema` prints what it may hold.",
        ) from error
    for agent in suite.agents:
        if not (path.parent / agent.directory).is_dir():
            raise UsageError(f"The suite file {path}: the directory of the agent {agent.name} does not exist.")
    if suite.env_file and not (path.parent / suite.env_file).is_file():
        raise UsageError(f"The suite file {path}: env_file {suite.env_file} does not exist.")
    return suite


def schema() -> dict[str, Any]:
    """The JSON Schema of suite files."""
    return Suite.model_json_schema()


def family_directories(suite: Suite, directory: Path) -> dict[str, tuple[str, ...]]:
    """The directories of the suite's families, each with its globs of tasks, in the file's order.

    Args:
        directory: the suite file's.

    Raises:
        UsageError: a glob finds no directory.
    """
    found: dict[str, tuple[str, ...]] = {}
    for entry in suite.families:
        pattern = os.path.join(directory, entry.path)  # noqa: PTH118 - Path would drop what globs need
        matches = sorted(path for path in glob.glob(pattern) if Path(path).is_dir())  # noqa: PTH207
        if not matches:
            raise UsageError(f"{entry.path} of the suite finds no directory in {directory}.")
        for match in matches:
            path = str(Path(match).resolve())
            found[path] = (*found.get(path, ()), *entry.tasks)
    return found


def expand(suite: Suite, tasks: Mapping[str, Sequence[str]], wanted: Mapping[str, Sequence[str]]) -> list[Run]:
    """All runs of a suite. Pure.

    Args:
        tasks: family's directory -> the names of all its tasks.
        wanted: family's directory -> globs of those to run.

    Raises:
        UsageError: a glob finds no task, or there are too many runs.
    """
    workers = [*(one.name for one in suite.agents), *(one.name for one in suite.submissions)]
    runs = []
    for directory, globs in wanted.items():
        for task in _matching(tasks[directory], globs, Path(directory).name):
            for worker in workers:
                for repetition in range(1, suite.repetitions + 1):
                    key = f"{Path(directory).name}/{task}/{worker}/{repetition}"
                    runs.append(Run(key=key, family=directory, task=task, agent=worker, repetition=repetition))
    if len(runs) > MAXIMUM_RUNS:
        raise UsageError(f"The suite means {len(runs)} runs; {MAXIMUM_RUNS} are the most.")
    if len({run.key for run in runs}) != len(runs):
        raise UsageError("Two families of the suite have the same name; a batch needs them apart.")
    return runs


def _matching(names: Iterable[str], globs: Sequence[str], family: str) -> list[str]:
    known = list(names)
    for pattern in globs:
        if not fnmatch.filter(known, pattern):
            raise UsageError(f"The family {family} has no task {pattern!r}.", hint="`provisioner tasks` lists them.")
    return [name for name in known if any(fnmatch.fnmatchcase(name, pattern) for pattern in globs)]
