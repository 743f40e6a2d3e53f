"""Reads an eval's compose file or Dockerfile, and replaces its variables by Compose's rules. Runs nothing of it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inspect_ai.util import ComposeConfig, ComposeService, is_compose_yaml, is_dockerfile

from provisioner import strict_yaml
from provisioner.errors import UsageError
from provisioner.family.env_file import load_env_file
from provisioner.validation import shown

MAXIMUM_BYTES = 1 << 20
MAXIMUM_VALUES = 100_000
# The key at a compose file's top whose value is a configuration of ours.
EXTENSION = "x-provisioner"
METADATA = "SAMPLE_METADATA_"

# What Inspect's docker sandbox makes of a Dockerfile alone.
_OF_A_DOCKERFILE = {"command": "tail -f /dev/null", "init": True, "stop_grace_period": "1s"}
# As in Compose's file reference, "Interpolation", without variables inside of a default.
_VARIABLE = re.compile(
    r"\$(?:(?P<escaped>\$)|(?P<bare>[A-Za-z_][A-Za-z0-9_]*)|"
    r"\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?:(?P<rule>:?[-?+])(?P<text>[^${}]*))?\}|(?P<wrong>))"
)


@dataclass(frozen=True)
class ComposeFile:
    """What a compose file says, before its variables are replaced.

    Args:
        where: what messages call it.
        directory: the directory of its relative paths.
        document: its mapping, of plain values.
    """

    where: str
    directory: Path
    document: Mapping[str, Any]

    @property
    def settings(self) -> object:
        """What it says for us, under `x-provisioner`; None if it says nothing."""
        return self.document.get(EXTENSION)


def is_compose(path: str) -> bool:
    """Returns whether a file is a compose file or a Dockerfile by its name, as Inspect's docker sandbox decides."""
    return is_compose_yaml(path) or is_dockerfile(path)


def is_url(registry: str) -> bool:
    """Returns whether a registry is a mirror's address, and not a directory."""
    return registry.startswith(("http://", "https://"))


def read(given: str | ComposeConfig, *, has_internet: bool = False) -> ComposeFile:
    """Reads a compose file or a Dockerfile by its path, or takes Inspect's model of a compose file.

    Args:
        has_internet: whether the machine reaches any of it, so that the container of a Dockerfile alone may, too.

    Raises:
        UsageError: the file cannot be read, or has no services.
    """
    if isinstance(given, ComposeConfig):
        return _of_model(given)
    path = Path(given).absolute()
    if is_dockerfile(given):
        if not path.is_file():
            raise UsageError(f"{path} does not exist, or is no file.")
        service = {"build": {"context": ".", "dockerfile": path.name}, **_OF_A_DOCKERFILE}
        if not has_internet:
            service["network_mode"] = "none"
        return ComposeFile(str(path), path.parent, {"services": {"default": service}})
    value = strict_yaml.read(path, "The compose file", MAXIMUM_BYTES, plain=True)
    if not isinstance(value, dict) or not isinstance(value.get("services"), dict) or not value["services"]:
        raise UsageError(f"{path} is no compose file: it must have `services`, and at least one.")
    # Aliases of YAML can stand for many times what the file holds.
    if any(number >= MAXIMUM_VALUES for number, _ in enumerate(_values(value))):
        raise UsageError(f"{path} says more than {MAXIMUM_VALUES} values.")
    return ComposeFile(str(path), path.parent, value)


def _of_model(given: ComposeConfig) -> ComposeFile:
    if not given.services:
        raise UsageError("The ComposeConfig has no services.")
    document = given.model_dump(mode="json", by_alias=True, exclude_none=True)
    for service in document["services"].values():
        for name, info in ComposeService.model_fields.items():
            if info.alias and name in service:  # as Inspect's logs have it
                service[info.alias] = service.pop(name)
    return ComposeFile("The ComposeConfig", Path.cwd(), document)


def metadata_names(file: ComposeFile) -> set[str]:
    """Returns the names of the sample's metadata that a compose file refers to, as references have them."""
    texts = strings({key: value for key, value in file.document.items() if key != EXTENSION})
    names = {name for text in texts for name in variables_in(text)}
    return {name.removeprefix(METADATA) for name in names if name.startswith(METADATA)}


def variables_in(text: str) -> set[str]:
    """Returns the names of the variables that Compose replaces in a text."""
    return {name for match in _VARIABLE.finditer(text) if (name := match["name"] or match["bare"])}


def variables_of(file: ComposeFile, metadata: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that Compose would replace: of `.env` beside the file, of this process, of the sample.

    Args:
        metadata: the sample's metadata, by the names that references have.

    Raises:
        UsageError: `.env` is not valid.
    """
    env_file = file.directory / ".env"
    beside = load_env_file(env_file) if env_file.is_file() else {}
    return {**beside, **os.environ, **{METADATA + name: value for name, value in metadata.items()}}


class Room:
    """Counts the characters of a file with its aliases and variables in their places, before they take memory.

    Args:
        characters: how many there may be.
    """

    def __init__(self, characters: int = MAXIMUM_BYTES) -> None:
        self._most = self._left = characters

    def count(self, characters: int, where: str) -> None:
        """Counts more characters.

        Args:
            where: the path of keys that leads to them, for the message.

        Raises:
            UsageError: there are too many.
        """
        self._left -= characters
        if self._left < 0:
            raise UsageError(
                f"{where}: up to here, the file has more than {self._most} characters with its aliases and variables "
                "in their places. Shorten it."
            )


def interpolated(value: Any, variables: Mapping[str, str], where: str = "", room: Room | None = None) -> Any:
    """Returns a value of the file with each variable in its strings replaced. Keys stay as they are, as in Compose.

    Args:
        where: the path of keys that leads to the value, for messages.
        room: what counts the characters of the result; None for a count of its own.

    Raises:
        UsageError: a variable that must be there is not, `$` stands where Compose allows none, or the result is too
            large.
    """
    room = room or Room()
    if isinstance(value, str):
        # Before anything is replaced: no replacement is longer than its variable and the text that names it together.
        named = [match["bare"] or match["name"] for match in _VARIABLE.finditer(value)]
        room.count(len(value) + sum(len(variables.get(name or "", "")) for name in named), where)
        return _VARIABLE.sub(lambda match: _replaced(match, variables, where), value)
    if isinstance(value, list | tuple):
        return [interpolated(item, variables, f"{where}.{number}", room) for number, item in enumerate(value)]
    if isinstance(value, dict):
        room.count(sum(map(len, value)), where)
        return {key: interpolated(item, variables, f"{where}.{key}".lstrip("."), room) for key, item in value.items()}
    return value


def _replaced(match: re.Match[str], variables: Mapping[str, str], where: str) -> str:
    if match["escaped"]:
        return "$"
    name, rule, text = match["bare"] or match["name"], match["rule"] or "", match["text"] or ""
    if not name:
        raise UsageError(
            f"{where}: Compose reads $ as the beginning of a variable, and {shown(match.string)} has none there, or "
            "one inside of another's default. Write $$ for $."
        )
    found = variables.get(name)
    is_there = bool(found) if rule.startswith(":") else found is not None
    if rule.endswith("+"):
        return text if is_there else ""
    if is_there:
        return found or ""
    if rule.endswith("?") or (name.startswith(METADATA) and not rule):
        what = f"the sample's metadata {name.removeprefix(METADATA).lower()!r}" if name.startswith(METADATA) else name
        raise UsageError(f"{where} needs {what}, which is not there. {text}".strip())
    return text  # empty without a default, as in Compose


def strings(value: object) -> Iterator[str]:
    """Returns the strings in a value of the file, without its keys."""
    return (each for each in _values(value) if isinstance(each, str))


def _values(value: object) -> Iterator[object]:
    yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        yield from _values(item)
