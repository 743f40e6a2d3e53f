"""Defines the configuration of Inspect's sandbox `provisioner`: a machine of one's own, or a task family's task.

Other files than the sample's own may give settings for all samples: the operator's, and one beside the eval.
"""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast

from inspect_ai.util import ComposeConfig
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from provisioner.base import strict_yaml
from provisioner.base.clock import checked_ttl, parse_duration
from provisioner.base.errors import UsageError
from provisioner.base.models import NOT_MACHINES, Role
from provisioner.base.validation import Location, dotted, lines_of, listed, shown
from provisioner.environment.allowlist import parse_destination
from provisioner.inspect.blocking import is_new
from provisioner.inspect.compose import EXTENSION, is_compose, is_url, read

# Inspect's docker provider replaces the same form, from the sample's metadata.
REFERENCE = re.compile(r"\$\{SAMPLE_METADATA_([A-Z0-9_]+)\}")

# In the context of a validation: the sample's metadata is in its place, and no reference is to be replaced any more.
FINAL = "final"
# Stands between the file's directory and a path that begins with a reference. What comes of it is absolute, or relative
# to that directory. No path that was made absolute has it.
_FROM_HERE = "/./"


def is_open(value: str, info: ValidationInfo) -> bool:
    """Returns whether a string is checked later: once a sample's metadata is in its place."""
    return bool(REFERENCE.search(value)) and not (info.context or {}).get(FINAL)


def matching(pattern: str, rule: str) -> tuple[AfterValidator, WithJsonSchema]:
    """Returns what makes a type of strings that match a pattern, or have a reference to a sample's metadata.

    Args:
        rule: what the pattern asks for, in words, as the end of a message.
    """

    def check(value: str, info: ValidationInfo) -> str:
        if not re.fullmatch(pattern, value) and not is_open(value, info):
            raise ValueError(f"{shown(value)} is not possible: {rule}")
        return value

    either = rf"^({pattern})$|{REFERENCE.pattern}"
    return AfterValidator(check), WithJsonSchema({"type": "string", "pattern": either})


def from_here(directory: Path, path: str) -> str:
    """Makes a path absolute; one that begins with a reference only once the metadata is in its place."""
    return f"{directory}{_FROM_HERE}{path}" if REFERENCE.match(path) else joined(directory, path)


def final_path(path: str, info: ValidationInfo) -> str:
    """Returns a path once the metadata is in its place, which leads to nothing outside the directory before it.

    Raises:
        ValueError: the metadata leads elsewhere. What the author wrote is normalised before it is replaced.
    """
    if not (info.context or {}).get(FINAL):
        return path if REFERENCE.search(path) else os.path.normpath(path)
    if ".." in Path(path).parts:
        raise ValueError(f"{path[:200]!r} has .. in it, by which a sample's metadata may not lead elsewhere")
    directory, mark, rest = path.partition(_FROM_HERE)
    return joined(Path(directory), rest) if mark else path


def joined(directory: Path, path: str) -> str:
    """Returns a path as an absolute one: relative to a directory, or to a home if it begins with ~."""
    return os.path.normpath(directory / Path(path).expanduser())


def replaced(value: Any, values: Mapping[str, str]) -> Any:
    """Returns a value of JSON with each reference in its strings replaced.

    Args:
        values: the sample's metadata, by the names that references have.

    Raises:
        UsageError: a name is missing.
    """
    if isinstance(value, str):
        return REFERENCE.sub(lambda found: _value(found[1], values), value)
    if isinstance(value, list | tuple):
        return tuple(replaced(item, values) for item in value)
    if isinstance(value, dict):
        return {key: replaced(item, values) for key, item in value.items()}
    return value


def _value(name: str, values: Mapping[str, str]) -> str:
    if name not in values:
        raise UsageError(f"The sandbox's configuration needs the sample's metadata {name.lower()!r}, which it lacks.")
    return values[name]


# No control characters: the paths stand in scripts and units.
PATH = r"/[^\x00-\x1f\x7f]{0,4095}"
CONTROL = re.compile(r"[\x00-\x1f\x7f]")
# Of the problems of one mapping.
_MOST_TOLD = 5

_NAME = (
    r"[a-z]([a-z0-9-]{0,30}[a-z0-9])?",
    "a machine's name has 1 to 32 of a-z, 0-9 and -, with a letter first and no - at its end",
)
_USER = (r"[a-z_][a-z0-9_-]{0,31}", "a user's name has 1 to 32 of a-z, 0-9, _ and -, with a letter or _ first")
_WORKDIR = (rf"({PATH})?", "it must be an absolute path without control characters")
_PACKAGE = (
    r"[a-z0-9][a-z0-9+.-]*(=[A-Za-z0-9.+:~-]+)?",
    "it must be the name of one Debian package, in lower case, or NAME=VERSION",
)

Name = Annotated[str, *matching(*_NAME)]
User = Annotated[str, *matching(*_USER)]
Workdir = Annotated[str, *matching(*_WORKDIR)]
Package = Annotated[str, *matching(*_PACKAGE)]
Text = Annotated[str, Field(max_length=64 << 10)]
# A mapping that can be hashed, since Inspect compares configurations so.
Pairs = Annotated[
    tuple[tuple[Text, Text], ...],
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "string", "maxLength": 64 << 10}}),
]


def pairs(value: object, info: ValidationInfo) -> object:
    """Returns a mapping of texts as pairs, and anything else as it is, for pydantic to refuse.

    Raises:
        ValueError: a value is no text.
    """
    if not isinstance(value, dict):
        return value
    problems = [
        f"the value of {shown(name)} must be text, not {shown(text)}: write it in quotes"
        for name, text in value.items()
        if not isinstance(text, str)
    ]
    if problems:  # together with wrong names, which otherwise would be told only once these are mended
        names = [name for name in map(str, value) if info.field_name == "env" and not is_variable(name, info)]
        raise ValueError("; ".join([*problems[:_MOST_TOLD], *map(no_variable, names[:_MOST_TOLD])]))
    return tuple(value.items())


def is_variable(name: str, info: ValidationInfo) -> bool:
    """Returns whether a variable may be called so, or whether that is checked later."""
    return is_open(name, info) or bool(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name))


def no_variable(name: str) -> str:
    """Says that no variable may be called so, and what its name may be."""
    return f"{shown(name)} is not the name of a variable: use letters, digits and _, with no digit first"


# Where and at what price machines run, and what they reach. What they are is the sample's own file's to say.
SETTINGS = ("cloud", "region", "spot", "ttl", "budget", "internet", "allow", "registry", "fork", "require_kvm")
# The variable that names the operator's file.
VARIABLE = "PROVISIONER_INSPECT"


@dataclass(frozen=True)
class Layer:
    """The settings of one file.

    Args:
        where: what messages call it; empty for a file that is not there.
        values: plain values by key, with absolute paths.
    """

    where: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)


def layered(own: Mapping[str, Any], beside: Layer, operators: Layer) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns a sample's configuration with the settings of other files, and a line for each file that gave some.

    Args:
        own: what the sample's own file says.
        beside: the settings for what `own` does not say.
        operators: the settings that count whatever `own` says. With `internet: none`, `allow` is theirs, too.
    """
    decided = dict(operators.values)
    if decided.get("internet") == "none":
        decided.setdefault("allow", [])
    useless = {"internet", "registry"} if own.get("family") else set() if own.get("compose") else {"registry"}
    given = {key: value for key, value in decided.items() if key not in useless}
    defaults = {key: value for key, value in beside.values.items() if key not in {*useless, *own, *given}}
    parts = [(beside.where, defaults), (operators.where, given)]
    lines = tuple(f"{where} gives {', '.join(sorted(values))}." for where, values in parts if values)
    merged = {**defaults, **own, **given}
    if any(values.get("require_kvm") is True for values in (own, beside.values, decided)):
        merged["require_kvm"] = True  # whatever the others say
    return merged, lines


_log = logging.getLogger("provisioner.inspect")

# Inspect takes the first that is beside the task.
FILE_NAMES = ["provisioner.yaml", "provisioner.yml"]
COMPOSE_FILE_NAMES = ["compose.yaml", "compose.yml", "docker-compose.yaml", "docker-compose.yml", "Dockerfile"]
MAXIMUM_BYTES = 1 << 20
AN_AMOUNT = "write US dollars as a number alone, such as 5 or 2.50"
# Of one sample: more address blocks and probes than any eval has needed.
MOST_MACHINES = 20
# Each machine's own names for itself, in its /etc/hosts.
LOOPBACK = frozenset({"localhost", "ip6-localhost", "ip6-loopback"})


class _Section(BaseModel):
    """A frozen part of the configuration that refuses unknown keys and can be hashed."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


SectionType = TypeVar("SectionType", bound=_Section)


class Machine(_Section):
    """A machine without a task family, built once into an image.

    Args:
        name: how the eval names it, as in `sandbox("NAME")`.
        user: runs commands and owns written files, unless a call names another user.
        workdir: the directory of relative paths, made if it is not there; empty for /workspace.
        cpus, memory_gb, storage_gb: at least; memory and disk in GiB.
        packages: Debian packages.
        run: shell commands, run as root with internet access while the image is built.
        files: from paths in the machine to files or directories of the controller.
        env: variables of every command.
        services: from names to shell commands that systemd keeps running from boot on, as root.
        ready: a shell command of root, or a TCP port; the sample waits until the command succeeds, or until something
            listens at the port, for 5 minutes at most.
    """

    name: Name = "default"
    user: User = "root"
    workdir: Workdir = ""
    cpus: Annotated[float, Field(gt=0, le=1024)] | None = None
    memory_gb: Annotated[float, Field(gt=0, le=65536)] | None = None
    storage_gb: Annotated[float, Field(gt=0, le=65536)] | None = None
    packages: tuple[Package, ...] = ()
    run: tuple[Text, ...] = ()
    files: Pairs = ()
    env: Pairs = ()
    services: Pairs = ()
    ready: Annotated[int, Field(strict=True, ge=1, le=65535)] | Text = ""

    _are_pairs = field_validator("files", "env", "services", mode="before")(pairs)

    @field_validator("files")
    @classmethod
    def _are_paths(cls, value: Pairs, info: ValidationInfo) -> Pairs:
        for target, source in value:
            if is_open(target + source, info):
                continue
            if not re.fullmatch(PATH, target) or ".." in Path(target).parts or target.endswith("/"):
                raise ValueError(f"{target[:200]!r} is not the absolute path of a file or directory")
            if not Path(source).is_absolute():
                raise ValueError(f"{source[:200]!r} must be an absolute path once the configuration is read")
        return tuple((target, final_path(source, info)) for target, source in value)

    @field_validator("env")
    @classmethod
    def _are_variables(cls, value: Pairs, info: ValidationInfo) -> Pairs:
        for name, text in value:
            if not is_variable(name, info):
                raise ValueError(no_variable(name))
            if "\0" in text and not is_open(name, info):
                raise ValueError(f"the value of {shown(name)} has a null character")
        return value

    @field_validator("services")
    @classmethod
    def _are_services(cls, value: Pairs, info: ValidationInfo) -> Pairs:
        for name, command in value:
            if is_open(name, info):
                continue
            if not re.fullmatch(r"[a-z][a-z0-9-]{0,31}", name):
                raise ValueError(
                    f"{shown(name)} is not a service's name: use 1 to 32 of a-z, 0-9 and -, with a letter first"
                )
            if CONTROL.search(command) or not command.strip():
                raise ValueError(f"the command of {name} is empty, or has several lines or control characters")
        return value


class Configuration(_Section):
    """The configuration of one sample's machines.

    Args:
        cloud: `local` or `aws`.
        region, spot: where on AWS; a region's name, and whether the spot market is tried first.
        ttl: the time to live, such as 2h; empty: from the sample's time limit, or 4 hours.
        budget: US dollars for all samples of one process whose configuration names the same amount; None for the
            standing budgets alone.
        machines: machines without a task family; the first is the default. They share a private network.
        internet: whether they reach the internet.
        allow: destinations, HOST:PORT, that machines without internet reach all the same.
        family, task: a task family's directory and task, in the place of machines and internet.
        env_file: the file with the task's secrets.
        compose: a compose file or Dockerfile, whose services run in one machine, in the place of machines; one entry of
            `machines` may say the machine's size, and what else is in it.
        registry: where the images of `compose` come from: a directory of archives of `docker save`, or the address of a
            mirror of the Docker Hub; empty for the registries that the images' names say.
        fork: `epochs` freezes the epoch of a sample that comes up first, and the others start as copies of it;
            `samples` does so for all samples that have the same configuration.
        require_kvm: whether local machines start under KVM alone.
        on_restart: if the engine starts a service's container again, `note` says so in the sample's log, and
            `fail` makes all later calls fail, as in a lost machine.
    """

    cloud: Literal["local", "aws"] = "local"
    region: str = ""
    spot: bool = False
    ttl: str = ""
    budget: Annotated[
        Annotated[float, Field(ge=0, le=1e9)] | None,
        WithJsonSchema({"type": "number", "minimum": 0, "maximum": 1e9}),  # an empty one would mean no limit
    ] = None
    machines: Annotated[tuple[Machine, ...], Field(max_length=MOST_MACHINES)] = ()
    internet: Literal["none", "full"] = "none"
    allow: tuple[str, ...] = ()
    family: str = ""
    task: str = ""
    env_file: str = ""
    compose: Annotated[str | ComposeConfig, WithJsonSchema({"type": "string"})] = ""
    registry: str = ""
    fork: Literal["none", "epochs", "samples"] = "none"
    require_kvm: Annotated[bool, Field(strict=True)] = False
    on_restart: Literal["note", "fail"] = "note"
    _given_by: tuple[str, ...] = PrivateAttr(())

    @field_validator("ttl", mode="before")
    @classmethod
    def _has_a_unit(cls, value: object) -> object:
        """Turns a bare YAML number into text, so that the error can ask for a unit."""
        return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value

    @field_validator("budget", mode="before")
    @classmethod
    def _is_an_amount(cls, value: object) -> object:
        if isinstance(value, bool) or (isinstance(value, str) and not re.fullmatch(r"\s*\d+(\.\d*)?\s*", value)):
            raise ValueError(f"{shown(value)} is not an amount: {AN_AMOUNT}")
        return value

    @field_validator("ttl")
    @classmethod
    def _is_a_ttl(cls, value: str, info: ValidationInfo) -> str:
        try:
            if value and not is_open(value, info):
                checked_ttl(parse_duration(value))
        except UsageError as error:
            raise ValueError(f"{error.message} {error.hint or ''}".strip()) from error
        return value

    @field_validator("allow")
    @classmethod
    def _are_destinations(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        try:
            for text in value:
                if not is_open(text, info):
                    parse_destination(text)
        except UsageError as error:
            raise ValueError(f"{error.message} {error.hint or ''}".strip()) from error
        return value

    @field_validator("family", "env_file", "compose", "registry")
    @classmethod
    def _is_absolute(cls, value: str | ComposeConfig, info: ValidationInfo) -> str | ComposeConfig:
        """A later eval-retry reads it from the log, in another directory."""
        if not isinstance(value, str) or not value or is_open(value, info) or is_url(value):
            return value
        return joined(Path.cwd(), final_path(value, info))

    @field_validator("machines", mode="before")
    @classmethod
    def _is_a_list(cls, value: object) -> object:
        if isinstance(value, dict) and value:
            name = str(next(iter(value)))[:32]
            raise ValueError(f"must be a list: write `- name: {name}` in place of `{name}:`")
        return value

    @field_validator("machines")
    @classmethod
    def _have_names_of_their_own(cls, value: tuple[Machine, ...]) -> tuple[Machine, ...]:
        names = [machine.name for machine in value]
        if reserved := sorted(LOOPBACK.intersection(names)):
            raise ValueError(f"no machine may be called {reserved[0]}, which is the machine itself to each")
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two machines are called {repeated[0]}")
        # `default` is what Inspect calls the first machine, whatever its name is.
        if taken := sorted({*NOT_MACHINES, "primary", "aux", "default"}.intersection(names[1:])):
            only_first = taken[0] == "default"
            problem = "only the first machine may be called default" if only_first else f"{taken[0]} is reserved"
            raise ValueError(f"{problem}: choose another name")
        return value

    @model_validator(mode="after")
    def _has_a_machine_for_compose(self) -> Configuration:
        if not self.compose:
            if self.registry:
                raise ValueError("`registry` belongs to a compose file: name it as `compose`")
            if self.on_restart != "note":
                raise ValueError("`on_restart` belongs to a compose file: name it as `compose`")
            return self
        if self.family:
            raise ValueError("`family` and `compose` exclude each other")
        if len(self.machines) > 1:
            raise ValueError("with `compose` there is one machine: give `machines` one entry at most")
        for machine in self.machines:
            # A log has all fields of a machine, with their defaults.
            names = ("env", "name", "user", "workdir")
            if given := [name for name in names if getattr(machine, name) != getattr(Machine(), name)]:
                raise ValueError(f"with `compose`, each service says it: remove {given[0]} of the machine")
        return self

    @model_validator(mode="after")
    def _can_fork(self) -> Configuration:
        if self.fork != "none" and self.cloud != "local":
            raise ValueError(f"`fork: {self.fork}` needs `cloud: local`: environments on {self.cloud} cannot be frozen")
        return self

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Configuration:
        if not self.family:
            if self.task or self.env_file:
                raise ValueError("`task` and `env_file` belong to a task family: name it as `family`")
            return self
        if self.machines or self.internet != "none":
            raise ValueError("a task family says itself which machines it has and whether they reach the internet")
        if not self.task:
            raise ValueError("`family` needs a `task`")
        return self

    @property
    def given_by(self) -> tuple[str, ...]:
        """A line for each other file than the sample's own that gives settings: which file, and which settings."""
        return self._given_by

    @property
    def by_role(self) -> dict[Role, Machine]:
        """The machines of a configuration without a family, by the roles that they have in their environment."""
        first, *others = self.machines or (Machine(),)
        return {"primary": first, **{machine.name: machine for machine in others}}


def configuration_of(given: BaseModel | str | None, directory: Path | None = None) -> Configuration:
    """Returns the configuration that an eval names: none, a file's path, or a model, of ours or of a compose file.

    The operator's settings count in each. Those of a file beside the eval stand in for what the named file leaves out.

    Args:
        directory: the eval's; None for the working directory.

    Raises:
        UsageError: it is not valid, or meant for another provider.
    """
    if given is None:
        return written({}, "The sandbox's configuration")
    if isinstance(given, Configuration):  # perhaps of a log, where nothing was refused (from_log)
        model = _model(given)
        value = given.model_dump(exclude=set(model), exclude_none=True)
        return written({**value, **model}, "The sandbox's configuration")
    if isinstance(given, str):
        given = os.path.normpath(given)  # as Docker's command does: `..` may follow a file
    path = file_beside(given, directory)
    beside = settings_of(path, str(path)) if path else Layer()
    if isinstance(given, ComposeConfig) or (isinstance(given, str) and is_compose(given)):
        return _of_compose(given, beside)
    if isinstance(given, str):
        return load(Path(given), beside)
    raise UsageError(
        f"The sandbox provisioner cannot read a {type(given).__name__}.",
        hint="Give a `Configuration` of provisioner.inspect.configuration, a ComposeConfig, or a file.",
    )


def file_beside(given: BaseModel | str | None, directory: Path | None = None) -> Path | None:
    """Returns the file beside the eval whose settings stand in for what a configuration leaves out; None for none.

    Args:
        given: as for configuration_of. What Python code says is complete.
        directory: the eval's; None for the working directory.
    """
    if given is None or isinstance(given, Configuration):
        return None
    paths = [(directory or Path.cwd()) / name for name in FILE_NAMES]
    path = next((path for path in paths if path.is_file()), None)
    is_itself = path and isinstance(given, str) and path.resolve() == Path(given).resolve()
    return None if is_itself else path


def operators_settings() -> Layer:
    """Returns the settings of the file that PROVISIONER_INSPECT names; of none if it is not set.

    Raises:
        UsageError: the file is not valid, or says what is the eval's to say.
    """
    named = os.environ.get(VARIABLE)
    if not named:
        return Layer()
    path, where = Path(named).expanduser(), f"{named} ({VARIABLE})"
    if not path.is_absolute() or not path.is_file():
        raise UsageError(
            f"{where} is not the absolute path of a file.",
            hint=f"Inspect changes its working directory. Write the whole path, such as {VARIABLE}=$PWD/settings.yaml.",
        )
    if others := sorted(set(_mapping(path)) - set(SETTINGS)):
        raise UsageError(
            f"{where} may not have {', '.join(others)}: it is for all samples, whatever their machines are.",
            hint=f"It may have {', '.join(SETTINGS)}.",
        )
    return settings_of(path, where)


def settings_of(path: Path, where: str) -> Layer:
    """Returns the settings in a configuration file, without what it says of machines.

    Raises:
        UsageError: it cannot be read, or a setting is not valid.
    """
    value = _mapping(path)
    values = _absolute({key: value[key] for key in SETTINGS if key in value}, path.absolute().parent)
    _refuse_empty_budget(values, where)
    checked({**values, "compose": "compose.yaml"}, where)  # to which `registry` belongs
    return Layer(where, values)


def _of_compose(given: ComposeConfig | str, beside: Layer) -> Configuration:
    """Returns the configuration of a compose file without a configuration file: what the file's extension says."""
    file = read(given)
    value = {} if file.settings is None else file.settings
    where = f"{file.where}: {EXTENSION}"
    if not isinstance(value, dict):
        raise UsageError(f"{where} must be a mapping, with keys such as `internet` or `allow`.")
    if given_twice := sorted({"compose", "family", "task", "env_file"}.intersection(value)):
        raise UsageError(f"{where}.{given_twice[0]} is not possible in a compose file.")
    compose = given if isinstance(given, ComposeConfig) else str(Path(given).absolute())
    return written({**_absolute(value, file.directory), "compose": compose}, where, beside)


def load(path: Path, beside: Layer | None = None) -> Configuration:
    """Reads a configuration file. Relative paths in it are relative to its directory.

    Args:
        beside: settings for what the file leaves out; None for none.

    Raises:
        UsageError: it cannot be read or is not valid; the message has one line per problem.
    """
    value = _mapping(path)
    if "services" in value:  # a compose file by a name of its own
        return _of_compose(str(path), beside or Layer())
    configuration = written(_absolute(value, path.absolute().parent), str(path.absolute()), beside)
    named = configuration.compose
    with suppress(UsageError):  # which the sample tells
        if named and read(named).settings is not None:
            said = f"{EXTENSION} in {named} counts for nothing, as {path.absolute()} names it: move its keys there."
            if is_new(said):
                _log.warning("%s", said)
    return configuration


def _mapping(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise UsageError(
            f"The sandbox's configuration {path.absolute()} cannot be read: it does not exist.",
            hint="Inspect looks for a relative path in the directory of the task's file. Write an absolute path.",
        )
    value = strict_yaml.read(path, "The sandbox's configuration", MAXIMUM_BYTES)
    if value is None:
        raise UsageError(f"{path.absolute()} is empty: write `{{}}` for one machine of the default kind.")
    if not isinstance(value, dict):
        raise UsageError(f"{path.absolute()} must be a mapping, with keys such as `machines` or `family`.")
    return value


def written(value: Mapping[str, Any], where: str, beside: Layer | None = None) -> Configuration:
    """Returns a configuration from what a user wrote, with the operator's settings.

    Args:
        beside: settings for what the user left out; None for none.

    Raises:
        UsageError: it is not valid; the message has one line per problem.
    """
    _refuse_empty_budget(value, where)
    merged, lines = layered(value, beside or Layer(), operators_settings())
    configuration = checked(merged, " ".join([where, *(f"({line.rstrip('.')})" for line in lines)]))
    configuration._given_by = lines
    return configuration


def _refuse_empty_budget(value: Mapping[str, Any], where: str) -> None:
    """Refuses an empty budget, which must not mean that there is no limit."""
    if value.get("budget", 0) is None:
        raise UsageError(f"{where} is not valid:{listed([f'budget: is empty: {AN_AMOUNT}, or leave it out'])}")


def checked(value: Mapping[str, Any], where: str, *, final: bool = False) -> Configuration:
    """Returns a configuration from plain values.

    Args:
        where: what messages call it.
        final: whether the sample's metadata is in its place, so that nothing is let through until then.

    Raises:
        UsageError: it is not valid; the message has one line per problem.
    """
    try:
        return Configuration.model_validate(value, context={FINAL: final})
    except ValidationError as error:
        lines = lines_of(error, _known_keys, partial(_place, value.get("machines")))
        raise UsageError(f"{where} is not valid:{listed(lines)}") from None


def _place(machines: object, location: Location) -> str:
    """Formats a path, with a machine's name beside its number, if it has one."""
    match location:
        case "machines", int(number), _, *_ if isinstance(machines, list | tuple):
            machine = machines[number]
            name = machine.get("name") if isinstance(machine, Mapping) else None
            if isinstance(name, str):
                return f"{dotted(location[:2])} ({shown(name)}).{dotted(location[2:])}"
    return dotted(location)


def _known_keys(location: Location) -> Iterable[str]:
    """Returns the keys that are allowed in the place of an unknown one."""
    return (Machine if len(location) > 1 else Configuration).model_fields


def _absolute(value: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Makes the file's paths absolute: a later eval-retry reads them from the log, in another directory."""
    found = dict(value)
    for key in ("family", "env_file", "compose", "registry"):
        if isinstance(found.get(key), str) and found[key] and not is_url(found[key]):
            found[key] = from_here(directory, found[key])
    if isinstance(found.get("machines"), list):
        found["machines"] = [_with_absolute_files(machine, directory) for machine in found["machines"]]
    return found


def _with_absolute_files(machine: object, directory: Path) -> object:
    if not isinstance(machine, dict) or not isinstance(machine.get("files"), dict):
        return machine
    files = {
        target: from_here(directory, source) if isinstance(source, str) else source
        for target, source in machine["files"].items()
    }
    return machine | {"files": files}


def with_metadata(configuration: Configuration, metadata: Mapping[str, Any]) -> Configuration:
    """Returns the configuration with each ${SAMPLE_METADATA_NAME} replaced by the sample's metadata.

    Names are compared as Inspect's docker provider does: in capitals, with `_` for spaces.

    Raises:
        UsageError: the metadata has no such name, or what comes of it is not valid.
    """
    model = _model(configuration)
    text = configuration.model_dump_json(exclude=set(model))
    if not REFERENCE.search(text):
        return configuration
    values = by_reference(metadata)
    # Before anything is replaced, which could take any amount of memory.
    wanted = Counter(REFERENCE.findall(text))
    if len(text) + sum(len(values.get(name, "")) * count for name, count in wanted.items()) > MAXIMUM_BYTES:
        raise UsageError(f"The configuration, with the sample's metadata, is larger than {MAXIMUM_BYTES} bytes.")
    value = {**replaced(configuration.model_dump(exclude=set(model)), values), **model}
    found = checked(value, "The configuration, with the sample's metadata,", final=True)
    found._given_by = configuration.given_by
    return found


def _model(configuration: Configuration) -> dict[str, ComposeConfig]:
    """Returns a compose file that is a model: as such it is kept, since Compose alone puts its variables in place."""
    return {"compose": configuration.compose} if isinstance(configuration.compose, ComposeConfig) else {}


def by_reference(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Returns a sample's metadata by the names that references have: in capitals, with `_` for spaces."""
    return {str(name).replace(" ", "_").upper(): str(value) for name, value in metadata.items()}


def references(configuration: Configuration) -> set[str]:
    """Returns the names of the metadata that a configuration refers to, and without which it is not valid."""
    return set(REFERENCE.findall(configuration.model_dump_json(exclude=set(_model(configuration)))))


def compose_references(configuration: Configuration) -> set[str]:
    """Returns the names of the metadata that a configuration's compose file may refer to, perhaps with a default.

    Raises:
        UsageError: the compose file cannot be read.
    """
    return read(configuration.compose).metadata_names if configuration.compose else set()


def image_metadata(configuration: Configuration, values: Mapping[str, str]) -> dict[str, str]:
    """Returns the metadata that a sample's images may depend on; nothing if they depend on none, or some are missing.

    Args:
        values: the sample's metadata, by the names that references have.

    Raises:
        UsageError: the compose file cannot be read, whatever the sample.
    """
    needed = references(configuration)
    if not needed <= values.keys():
        return {}  # the sample itself says so
    parts = configuration.model_dump_json(
        include={"family", "task", "env_file", "machines", "compose", "registry"} - _model(configuration).keys(),
        exclude={"machines": {"__all__": {"name", "env", "ready"}}},
    )
    optional: set[str] = set()
    try:
        optional = compose_references(with_metadata(configuration, values))
    except UsageError:
        if not needed:
            raise
    names = optional | (needed if optional or REFERENCE.search(parts) else set())
    return {name: values[name] for name in names & values.keys()}


def schema() -> dict[str, Any]:
    """Returns the JSON Schema of configuration files."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Configuration.model_json_schema()}


def from_log(value: Mapping[str, Any]) -> Configuration:
    """Returns the configuration that a log holds, perhaps written by another version of provisioner.

    What this version does not know is left out, and what it would refuse is kept: logs are mostly read to be looked at.
    """
    known = _known(Configuration, value)
    machines = known.pop("machines", ())
    if isinstance(machines, list | tuple):
        known["machines"] = tuple(
            _lenient(Machine, _known(Machine, each)) for each in machines if isinstance(each, dict)
        )
    return _lenient(Configuration, known)


def _known(model: type[BaseModel], value: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value[key] for key in model.model_fields if key in value}


def _lenient(model: type[SectionType], value: Mapping[str, Any]) -> SectionType:
    try:
        return model.model_validate(value)
    except ValidationError:
        frozen: dict[str, Any] = {key: _frozen(each) for key, each in value.items()}
        return cast(SectionType, model.model_construct(None, **frozen))


def _frozen(value: object) -> object:
    """Returns a value of a log that can be hashed."""
    if isinstance(value, dict):
        return tuple((key, _frozen(each)) for key, each in value.items())
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value
