"""Defines the types of single values of the configuration, and references to a sample's metadata in its strings.

Each type has its rule in words for messages. References are found, checked once the metadata is known, and replaced.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationInfo, WithJsonSchema

from provisioner.errors import UsageError
from provisioner.validation import shown

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
