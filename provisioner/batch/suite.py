"""Reads and checks suite files, and lists the runs that a suite asks for. Runs nothing."""

from __future__ import annotations

import fnmatch
import glob
import os
import re
from collections.abc import Mapping, Sequence
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from provisioner.base import strict_yaml
from provisioner.base.clock import DEFAULT_TTL, checked_ttl, format_duration, parse_duration
from provisioner.base.errors import UsageError
from provisioner.base.models import Record
from provisioner.base.printable import printable
from provisioner.base.validation import lines_of, listed, shown
from provisioner.clouds.registry import CLOUDS, DEFAULT_CLOUD, clouds_with_places
from provisioner.environment.allowlist import parse_destination
from provisioner.family.env_file import refuse_env_file_of_agent
from provisioner.store.environments import derived_id

MAX_RUNS = 10_000
MAX_BYTES = 1 << 20
TASKS_SHOWN = 20
HINT = "`provisioner batch schema` prints the keys and values that a suite file may have."
FAMILY_HINT = "Paths are relative to the suite file. A family is a directory NAME with a file NAME.py."
DEFAULT_AGENT_TIME = timedelta(hours=1)

_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"


def _checked_name(value: str) -> str:
    if not re.fullmatch(_NAME, value):
        raise ValueError(
            f"{shown(value)} is not a name: use 1 to 64 of A-Z, a-z, 0-9, _ . -, beginning with a letter or digit"
        )
    return value


def _checked_duration(value: object) -> object:
    try:
        parse_duration(value if isinstance(value, str) else shown(value))
    except UsageError as error:
        raise ValueError(f"{error.message} {error.hint or ''}".strip()) from error
    return value


def _checked_text(value: str) -> str:
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError("it is not UTF-8 text")
    return value


def _checked_not_empty(value: str) -> str:
    if not value.strip():
        raise ValueError("it must not be empty")
    return _checked_text(value)


def _checked_cloud(value: str) -> str:
    if value not in CLOUDS:
        raise ValueError(f"there is no cloud {shown(value)}; known: {', '.join(sorted(CLOUDS))}")
    return value


Name = Annotated[str, AfterValidator(_checked_name), WithJsonSchema({"type": "string", "pattern": f"^{_NAME}$"})]
Duration = Annotated[
    str, BeforeValidator(_checked_duration),
    WithJsonSchema({"type": "string", "pattern": r"^\s*(\d+[dD])?(\d+[hH])?(\d+[mM])?(\d+[sS])?\s*$"}),
]  # fmt: skip
Text = Annotated[str, AfterValidator(_checked_text)]
CloudName = Annotated[str, AfterValidator(_checked_cloud), WithJsonSchema({"type": "string", "enum": sorted(CLOUDS)})]
NotEmpty = Annotated[str, AfterValidator(_checked_not_empty), WithJsonSchema({"type": "string", "pattern": r"\S"})]
Dollars = Annotated[Decimal, Field(ge=0, le=1_000_000), WithJsonSchema({"type": "number", "minimum": 0})]


class Part(BaseModel):
    """A part of a suite file: immutable, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class FamilyEntry(Part):
    """Task families, and which of their tasks to run."""

    path: NotEmpty
    """A glob of the families' directories, relative to the suite file."""
    tasks: tuple[NotEmpty, ...] = Field(default=("*",), min_length=1)
    """Globs of the tasks' names."""


class Agent(Part):
    """An agent that works on the tasks."""

    name: Name
    directory: NotEmpty
    """The agent's files, relative to the suite file; they are copied to /home/agent/scaffolding."""
    command: NotEmpty
    """The command that starts it there."""


class Submission(Part):
    """A submission that is scored without an agent."""

    name: Name
    text: Text


class Limits(Part):
    """How long things may take, as 30m, 4h, 1h30m or 2d."""

    ttl: Duration = format_duration(DEFAULT_TTL)
    """An environment's time to live: 1m to 7d."""
    agent: Duration | None = None
    """How long an agent may work. Then it is stopped, and its work so far is scored. Default: an hour, or half of the
    ttl if that is less."""

    @property
    def agent_limit(self) -> timedelta:
        """How long an agent may work, as the suite says or by default."""
        if self.agent is None:
            return min(DEFAULT_AGENT_TIME, parse_duration(self.ttl) / 2)
        return parse_duration(self.agent)

    @field_validator("ttl")
    @classmethod
    def _is_possible(cls, value: str) -> str:
        try:
            checked_ttl(parse_duration(value))
        except UsageError as error:
            raise ValueError(error.message) from error
        return value

    @model_validator(mode="after")
    def _leave_time(self) -> Limits:
        if self.agent_limit >= parse_duration(self.ttl):
            raise ValueError(
                f"agent ({self.agent}) leaves no time for scoring: it must be less than the ttl ({self.ttl})"
            )
        return self


class Suite(Part):
    """A suite file."""

    name: Name
    """The suite's name. The batch's id begins with it: in small letters, `-` for what is neither letter nor digit."""
    families: tuple[FamilyEntry, ...] = Field(min_length=1)
    """The task families to run."""
    agents: tuple[Agent, ...] = ()
    """The agents that work on the tasks. There must be at least one agent or submission."""
    submissions: tuple[Submission, ...] = ()
    """Submissions that are scored without an agent."""
    repetitions: int = Field(default=1, ge=1, le=1000, strict=True)
    """How many times each task is run with each agent and submission."""
    cloud: CloudName = DEFAULT_CLOUD
    """Where the machines run."""
    regions: tuple[NotEmpty, ...] = ()
    """Regions of the aws cloud. The first is used; the others while it lacks capacity."""
    spot: bool = Field(default=False, strict=True)
    """Whether to try spot instances first."""
    limits: Limits = Limits()
    concurrency: int = Field(default=2, ge=1, le=1000, strict=True)
    """How many environments may exist at once."""
    budget: Dollars | None = None
    """What the whole batch may cost, in US dollars. Default: only the standing budgets apply."""
    retries: int = Field(default=2, ge=0, le=10, strict=True)
    """How many times a run is retried that failed through no fault of its own."""
    allow: tuple[str, ...] = ()
    """What environments without internet may reach, as HOST:PORT."""
    require_kvm: bool = Field(default=False, strict=True)
    """Whether local machines start under KVM alone."""
    record: bool = Field(default=True, strict=True)
    """Whether calls, terminals and packets are recorded."""
    env_file: NotEmpty | None = None
    """The file with the tasks' secrets, relative to the suite file, and outside of families and agents."""

    @property
    def is_billed(self) -> bool:
        """Whether its machines cost anything."""
        return CLOUDS[self.cloud].is_billed

    # Validators check single fields where that is possible: so one mistake does not hide another.
    @model_validator(mode="after")
    def _has_work(self) -> Suite:
        if not self.agents and not self.submissions:
            raise ValueError("it names neither agents nor submissions")
        return self

    @field_validator("agents", "submissions")
    @classmethod
    def _have_different_names(cls, value: tuple[Agent | Submission, ...], others: ValidationInfo) -> tuple[Any, ...]:
        names = [entry.name for entry in (*others.data.get("agents", ()), *value)]
        if duplicates := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two agents or submissions are called {', '.join(duplicates)}")
        return value

    @field_validator("regions")
    @classmethod
    def _are_different(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) < len(value):
            raise ValueError("it names a region twice")
        return value

    @field_validator("regions", "spot")
    @classmethod
    def _need_a_cloud_with_places(cls, value: Any, others: ValidationInfo) -> Any:
        cloud = others.data.get("cloud")
        if value and cloud in CLOUDS and not CLOUDS[cloud].has_places:
            raise ValueError(f"only for cloud: {clouds_with_places()}")
        return value

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
        key: FAMILY/TASK/AGENT/REPETITION, so the same for the same run of the same suite.
        family: the family's directory.
        agent: name of the agent or submission.
        repetition: from 1.
    """

    key: str
    family: str
    task: str
    agent: str
    repetition: int


def environment_id(batch: str, run: str, task: str, attempt: int) -> str:
    """Returns the id of the environment of a run's attempt, the same in every process.

    Args:
        batch: its id.
        run: its key.
        attempt: from 1.
    """
    return derived_id(run.split("/")[0], task, f"{batch}/{run}/{attempt}")


def load_suite(path: Path) -> Suite:
    """Reads and checks a suite file.

    Raises:
        UsageError: it cannot be read, or it is not valid; the message names all mistakes.
    """
    title = f"The suite file {path}"
    if not isinstance(value := strict_yaml.read(path, "The suite file", MAX_BYTES), dict):
        raise UsageError(f"{title} must be a mapping, with the keys name, families and agents.", hint=HINT)
    try:
        suite = Suite.model_validate(value)
    except ValidationError as error:
        lines = lines_of(error, _known_keys)
        hint = "A number, a date, yes and no are text only in quotes. " if "must be a string" in "".join(lines) else ""
        raise UsageError(f"{title} is not valid:{listed(lines)}", hint=hint + HINT) from error
    try:
        _check_files(suite, path)
    except OSError as error:  # a name that is too long, or a directory that may not be entered
        where = shown(error.filename or "")
        raise UsageError(f"{title} names a path that cannot be looked at: {error.strerror}: {where}") from error
    return suite


def _known_keys(location: tuple[int | str, ...]) -> list[str]:
    """Returns the keys that are allowed in the place of an unknown one."""
    parts: dict[int | str, type[Part]] = {
        "families": FamilyEntry, "agents": Agent, "submissions": Submission, "limits": Limits,
    }  # fmt: skip
    return list((parts.get(location[0], Suite) if len(location) > 1 else Suite).model_fields)


def _check_files(suite: Suite, path: Path) -> None:
    """Raises UsageError if the suite names files or directories that do not exist, or an env file in an agent's."""
    lines = []
    for number, entry in enumerate(suite.families):
        if not _matches(entry, path.parent):
            lines.append(f"families.{number}.path: {_nothing_found(entry, path.parent)}")
    directories = [path.parent / agent.directory for agent in suite.agents]
    for number, directory in enumerate(directories):
        if not directory.is_dir():
            state = "is not a directory" if directory.exists() else "does not exist"
            lines.append(f"agents.{number}.directory: {directory} {state}")
    env_file = path.parent / suite.env_file if suite.env_file else None
    if env_file and not env_file.is_file():
        lines.append(f"env_file: {env_file} {'is not a file' if env_file.exists() else 'does not exist'}")
    if lines:
        named = listed(printable(line) for line in lines)
        raise UsageError(
            f"The suite file {path} names files or directories that cannot be used:{named}", hint=FAMILY_HINT
        )
    if env_file:
        for directory in directories:
            refuse_env_file_of_agent(directory, env_file)


def schema() -> dict[str, Any]:
    """Returns the JSON Schema of suite files."""
    return Suite.model_json_schema()


def family_directories(suite: Suite, directory: Path) -> dict[str, tuple[str, ...]]:
    """Returns the directories of the suite's families, each with the globs of its tasks, in the file's order.

    Args:
        directory: the suite file's directory.

    Raises:
        UsageError: a glob finds no family, or two families have the same name.
    """
    globs: dict[str, tuple[str, ...]] = {}
    for entry in suite.families:
        if not (matches := _matches(entry, directory)):
            raise UsageError(f"The suite's path {_nothing_found(entry, directory)}.", hint=FAMILY_HINT)
        for match in matches:
            path = str(Path(match).resolve())
            globs[path] = (*globs.get(path, ()), *entry.tasks)
    names = [Path(path).name for path in globs]
    if duplicates := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"Two families of the suite are called {', '.join(duplicates)}; their names must differ.")
    return globs


def _matches(entry: FamilyEntry, directory: Path) -> list[str]:
    """Returns the directories that an entry's glob finds."""
    pattern = os.path.join(directory, entry.path)  # noqa: PTH118 - Path would drop what globs need
    matches = sorted(path for path in glob.glob(pattern) if Path(path).is_dir())  # noqa: PTH207
    if glob.escape(entry.path) != entry.path:  # a glob may also match directories beside the families
        matches = [path for path in matches if (Path(path) / f"{Path(path).resolve().name}.py").is_file()]
    return matches


def _nothing_found(entry: FamilyEntry, directory: Path) -> str:
    return f"{entry.path} finds no directory of a task family in {directory}"


def expand(suite: Suite, tasks: Mapping[str, Sequence[str]], wanted: Mapping[str, Sequence[str]]) -> list[Run]:
    """Returns all runs of a suite, in the order of the file. Pure.

    Args:
        tasks: the names of all tasks, by their family's directory.
        wanted: the globs of the tasks to run, by their family's directory.

    Raises:
        UsageError: a glob finds no task, or there are too many runs.
    """
    agents = [*(agent.name for agent in suite.agents), *(submission.name for submission in suite.submissions)]
    runs = []
    for directory, globs in wanted.items():
        for task in _matching(tasks[directory], globs, Path(directory).name):
            for agent in agents:
                for repetition in range(1, suite.repetitions + 1):
                    key = f"{Path(directory).name}/{task}/{agent}/{repetition}"
                    runs.append(Run(key=key, family=directory, task=task, agent=agent, repetition=repetition))
    if len(runs) > MAX_RUNS:
        raise UsageError(f"The suite asks for {len(runs)} runs; it may ask for at most {MAX_RUNS}.")
    return runs


def _matching(names: Sequence[str], globs: Sequence[str], family: str) -> list[str]:
    """Returns the task names that match one of the globs; each glob must match one."""
    for pattern in globs:
        if not fnmatch.filter(names, pattern):
            more = ", and more" if len(names) > TASKS_SHOWN else ""
            raise UsageError(
                f"The family {family} has no task {pattern!r}.",
                hint=f"It has: {', '.join(names[:TASKS_SHOWN])}{more}." if names else None,
            )
    return [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in globs)]
