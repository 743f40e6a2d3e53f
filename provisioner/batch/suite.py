"""The suite file: what to run, with what, how often, where and for how much. Read and checked here; runs nothing."""

from __future__ import annotations

import fnmatch
import glob
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from provisioner import strict_yaml
from provisioner.clouds.registry import CLOUDS, DEFAULT_CLOUD, clouds_with_places
from provisioner.environment.allowlist import parse_destination
from provisioner.errors import UsageError
from provisioner.family.env_file import refuse_env_file_of_agent
from provisioner.models import Record
from provisioner.ttl import DEFAULT_LIMIT, checked_limit, parse_duration, words
from provisioner.validation import lines_of, listed, shown

MAXIMUM_RUNS = 10_000
MAXIMUM_BYTES = 1 << 20
TASKS_SHOWN = 20
HINT = "`provisioner batch schema` prints what it may hold."
FAMILY_HINT = "Paths are relative to the suite file. A family is a directory NAME with a file NAME.py."
DEFAULT_AGENT_LIMIT = timedelta(hours=1)

_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"


def _name(value: str) -> str:
    if not re.fullmatch(_NAME, value):
        raise ValueError(f"{shown(value)} is no name: 1 to 64 of A-Z, a-z, 0-9, _ . -, the first a letter or digit")
    return value


def _duration(value: str) -> str:
    try:
        parse_duration(value)
    except UsageError as error:
        raise ValueError(f"{error.message} {error.hint or ''}".strip()) from error
    return value


def _text(value: str) -> str:
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError("it is not UTF-8 text")
    return value


def _filled(value: str) -> str:
    if not value.strip():
        raise ValueError("it must not be empty")
    return _text(value)


def _cloud(value: str) -> str:
    if value not in CLOUDS:
        raise ValueError(f"there is no cloud {shown(value)}; known: {', '.join(sorted(CLOUDS))}")
    return value


Name = Annotated[str, AfterValidator(_name), WithJsonSchema({"type": "string", "pattern": f"^{_NAME}$"})]
Duration = Annotated[
    str,
    AfterValidator(_duration),
    WithJsonSchema({"type": "string", "pattern": r"^\s*(\d+[dD])?(\d+[hH])?(\d+[mM])?(\d+[sS])?\s*$"}),
]
Text = Annotated[str, AfterValidator(_text)]
CloudName = Annotated[str, AfterValidator(_cloud), WithJsonSchema({"type": "string", "enum": sorted(CLOUDS)})]
Filled = Annotated[str, AfterValidator(_filled), WithJsonSchema({"type": "string", "pattern": r"\S"})]
Dollars = Annotated[Decimal, Field(ge=0, le=1_000_000), WithJsonSchema({"type": "number", "minimum": 0})]


class Part(BaseModel):
    """A part of a suite file: frozen, and without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class FamilyEntry(Part):
    """Families and tasks of them."""

    path: Filled
    """Directories of task families, as a glob relative to the suite file."""
    tasks: tuple[Filled, ...] = Field(default=("*",), min_length=1)
    """Globs of their tasks' names."""


class Agent(Part):
    """What works on the tasks."""

    name: Name
    directory: Filled
    """Relative to the suite file; copied to /home/agent/scaffolding."""
    command: Filled
    """What starts it there."""


class Submission(Part):
    """What is scored in an agent's place."""

    name: Name
    text: Text


class Limits(Part):
    """How long things may take, as 30m, 4h, 1h30m or 2d."""

    ttl: Duration = words(DEFAULT_LIMIT)
    """An environment, at most: 1m to 7d."""
    agent: Duration | None = None
    """An agent, at most; then it is stopped, and what it has left is scored. Default: an hour, or half of the ttl where
    that is less."""

    @property
    def agent_limit(self) -> timedelta:
        """How long an agent may take."""
        if self.agent is None:
            return min(DEFAULT_AGENT_LIMIT, parse_duration(self.ttl) / 2)
        return parse_duration(self.agent)

    @field_validator("ttl")
    @classmethod
    def _is_possible(cls, value: str) -> str:
        try:
            checked_limit(parse_duration(value))
        except UsageError as error:
            raise ValueError(error.message) from error
        return value

    @model_validator(mode="after")
    def _leave_time(self) -> Limits:
        if self.agent_limit >= parse_duration(self.ttl):
            raise ValueError(f"agent ({self.agent}) leaves no time for scoring: it must be less than ttl ({self.ttl})")
        return self


class Suite(Part):
    """A suite file."""

    name: Name
    """The beginning of the batch's id."""
    families: tuple[FamilyEntry, ...] = Field(min_length=1)
    """What to run."""
    agents: tuple[Agent, ...] = ()
    """With what; at least one agent or submission."""
    submissions: tuple[Submission, ...] = ()
    """What is scored in an agent's place."""
    repetitions: int = Field(default=1, ge=1, le=1000, strict=True)
    """How often each task is run with each agent and submission."""
    cloud: CloudName = DEFAULT_CLOUD
    """Where machines run."""
    regions: tuple[Filled, ...] = ()
    """Of the aws cloud: the first is used, the others where it lacks capacity."""
    spot: bool = Field(default=False, strict=True)
    """Whether to try spot instances first."""
    limits: Limits = Limits()
    concurrency: int = Field(default=2, ge=1, le=1000, strict=True)
    """Environments at once."""
    budget: Dollars | None = None
    """US dollars for the whole batch; without one, the standing budgets alone hold."""
    retries: int = Field(default=2, ge=0, le=10, strict=True)
    """Of a run that failed by no fault of its own."""
    allow: tuple[str, ...] = ()
    """What environments without internet may reach, HOST:PORT."""
    env_file: Filled | None = None
    """The tasks' secrets, relative to the suite file; outside the families and agents."""

    # Of single fields wherever that can be: then one mistake does not hide another.
    @model_validator(mode="after")
    def _has_work(self) -> Suite:
        if not self.agents and not self.submissions:
            raise ValueError("it names neither agents nor submissions")
        return self

    @field_validator("agents", "submissions")
    @classmethod
    def _are_apart(cls, value: tuple[Agent | Submission, ...], others: ValidationInfo) -> tuple[Any, ...]:
        names = [one.name for one in (*others.data.get("agents", ()), *value)]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two agents or submissions are called {', '.join(twice)}")
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
        UsageError: it cannot be read, or is not valid; the message names all places.
    """
    title = f"The suite file {path}"
    try:
        with path.open("rb") as file:
            data = file.read(MAXIMUM_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{title} cannot be read: {error.strerror}.") from error
    if len(data) > MAXIMUM_BYTES:
        raise UsageError(f"{title} is larger than 1 MiB.")
    value = strict_yaml.load(data, title)
    if not isinstance(value, dict):
        raise UsageError(f"{title} must be a mapping, with the keys name, families and agents.", hint=HINT)
    try:
        suite = Suite.model_validate(value)
    except ValidationError as error:
        lines = lines_of(error, _known_keys)
        hint = "A number, a date, yes and no are text only in quotes. " if "must be a string" in "".join(lines) else ""
        raise UsageError(f"{title} is not valid:{listed(lines)}", hint=hint + HINT) from error
    _check_files(suite, path)
    return suite


def _known_keys(location: tuple[int | str, ...]) -> list[str]:
    """The keys that may be where an unknown one is."""
    parts: dict[int | str, type[Part]] = {
        "families": FamilyEntry, "agents": Agent, "submissions": Submission, "limits": Limits,
    }  # fmt: skip
    return list((parts.get(location[0], Suite) if len(location) > 1 else Suite).model_fields)


def _check_files(suite: Suite, path: Path) -> None:
    lines = []
    for number, entry in enumerate(suite.families):
        if not _matches(entry, path.parent):
            lines.append(f"families.{number}.path: {_nothing_found(entry, path.parent)}")
    directories = [path.parent / agent.directory for agent in suite.agents]
    for number, directory in enumerate(directories):
        if not directory.is_dir():
            state = "is not a directory" if directory.exists() else "does not exist"
            lines.append(f"agents.{number}.directory: {directory} {state}")
    secrets = path.parent / suite.env_file if suite.env_file else None
    if secrets and not secrets.is_file():
        lines.append(f"env_file: {secrets} {'is not a file' if secrets.exists() else 'does not exist'}")
    if lines:
        raise UsageError(f"The suite file {path} names what is not there:{listed(lines)}", hint=FAMILY_HINT)
    if secrets:
        for directory in directories:
            refuse_env_file_of_agent(directory, secrets)


def schema() -> dict[str, Any]:
    """The JSON Schema of suite files."""
    return Suite.model_json_schema()


def family_directories(suite: Suite, directory: Path) -> dict[str, tuple[str, ...]]:
    """The directories of the suite's families, each with its globs of tasks, in the file's order.

    Args:
        directory: the suite file's.

    Raises:
        UsageError: a glob finds no family, or two families have the same name.
    """
    found: dict[str, tuple[str, ...]] = {}
    for entry in suite.families:
        matches = _matches(entry, directory)
        if not matches:
            raise UsageError(f"A family of the suite: {_nothing_found(entry, directory)}.", hint=FAMILY_HINT)
        for match in matches:
            path = str(Path(match).resolve())
            found[path] = (*found.get(path, ()), *entry.tasks)
    names = [Path(path).name for path in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"Two families of the suite are called {', '.join(twice)}; a batch needs them apart.")
    return found


def _matches(entry: FamilyEntry, directory: Path) -> list[str]:
    """The directories that an entry means."""
    pattern = os.path.join(directory, entry.path)  # noqa: PTH118 - Path would drop what globs need
    matches = sorted(path for path in glob.glob(pattern) if Path(path).is_dir())  # noqa: PTH207
    if glob.escape(entry.path) != entry.path:  # what else lies beside families is not meant
        matches = [path for path in matches if (Path(path) / f"{Path(path).resolve().name}.py").is_file()]
    return matches


def _nothing_found(entry: FamilyEntry, directory: Path) -> str:
    return f"{entry.path} finds no directory of a task family in {directory}"


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
    return runs


def _matching(names: Iterable[str], globs: Sequence[str], family: str) -> list[str]:
    known = list(names)
    for pattern in globs:
        if not fnmatch.filter(known, pattern):
            more = ", and more" if len(known) > TASKS_SHOWN else ""
            raise UsageError(
                f"The family {family} has no task {pattern!r}.",
                hint=f"It has: {', '.join(known[:TASKS_SHOWN])}{more}." if known else None,
            )
    return [name for name in known if any(fnmatch.fnmatchcase(name, pattern) for pattern in globs)]
