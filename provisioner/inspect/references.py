"""References to a sample's metadata in a configuration's strings: found, checked later, replaced."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import AfterValidator, ValidationInfo, WithJsonSchema

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
