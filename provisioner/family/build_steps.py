"""Parses build steps strictly and checks that their files lie inside the family directory. Runs none of them."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from provisioner.base import strict_json
from provisioner.base.errors import TaskFamilyError, explained
from provisioner.base.models import BuildStep, FileBuildStep, ShellBuildStep
from provisioner.base.validation import shown
from provisioner.family.files import is_skipped, list_files

FILE_NAME = "build_steps.json"
# Installs a module before the family's own is imported.
PIP_STEP = '{"type": "shell", "commands": ["pip install <PACKAGE>"]}'
MAXIMUM_BYTES = 4 << 20
MAXIMUM_STEPS = 1000
MAXIMUM_PATH_CHARACTERS = 4096

# What stands between the words of a shell's text that may be paths; the last is an option with its value, as -I/root/x.
_BETWEEN = re.compile(r"[\s;&|<>(){}\[\]=,:@*?`]+|-\w(?=/)")
_HOME = re.compile(r"\$(HOME|PWD)\b|\$\{(HOME|PWD)\}|~(root)?(?=/)")
_QUOTES = re.compile(r"[\"'\\]")

_KEYS = {"shell": {"type", "commands"}, "file": {"type", "source", "destination"}}


@explained("build-steps")
def load_build_steps(family_directory: Path) -> tuple[BuildStep, ...]:
    """Reads build_steps.json, if it exists, and checks the files that it names.

    Raises:
        TaskFamilyError: the file is not valid, or a source is missing or lies outside the family directory.
    """
    path = family_directory / FILE_NAME
    if not path.exists():
        return ()
    if not path.is_file():
        raise TaskFamilyError(f"{path} is not a file.")
    with path.open("rb") as file:
        data = file.read(MAXIMUM_BYTES + 1)
    try:
        value = strict_json.parse(data, limit_bytes=MAXIMUM_BYTES)
    except ValueError as error:
        raise TaskFamilyError(f"{FILE_NAME} cannot be read: {error}.") from None
    steps = parse_build_steps(value, FILE_NAME)
    check_build_steps(steps, family_directory, FILE_NAME)
    return steps


def with_reads(steps: Iterable[BuildStep], directory: Path, files: Iterable[str]) -> tuple[BuildStep, ...]:
    """Returns build steps of which each shell step says what of the family it reads: what its text names, under /root.

    Args:
        directory: the family's.
        files: those of the family, relative to the directory.
    """
    # From each top-level file or directory to those that its links lead to.
    leads = defaultdict[str, set[str]](set)
    for name in files:
        path = directory / name
        target = Path(name).parent / path.readlink() if path.is_symlink() else Path(name)
        leads[name.partition("/")[0]].add(os.path.normpath(target).partition("/")[0])
    seen: set[str] = set()

    def told(step: BuildStep) -> BuildStep:
        if isinstance(step, FileBuildStep):
            return step
        new: set[str] = set()
        named = leads.keys() & set(_named("\n".join(step.commands)))
        while named := named - seen:
            new |= named
            seen.update(named)
            named = {target for name in named for target in leads[name]}
        return step.model_copy(update={"reads": tuple(sorted(new))})

    return tuple(map(told, steps))


def _named(text: str) -> Iterator[str]:
    """Yields the first components of all paths in a shell's text that are relative, or below root's home."""
    text = _HOME.sub("/root", text)
    bare = _QUOTES.sub("", text)
    for word in {*_BETWEEN.split(bare), *bare.split(), *_QUOTES.split(text)}:
        parts = [part for part in word.split("/") if part not in ("", ".")]
        if word.startswith("/"):
            parts = parts[1:] if parts[:1] == ["root"] else []
        yield from parts[:1]


@explained("build-steps")
def parse_build_steps(value: object, where: str) -> tuple[BuildStep, ...]:
    """Converts decoded JSON to build steps. The contents stay data: nothing in them is expanded or run.

    Args:
        value: the decoded JSON.
        where: the name that messages use for it.

    Raises:
        TaskFamilyError: the value is not a list of build steps.
    """
    if not isinstance(value, list | tuple):
        raise TaskFamilyError(f"{where} must be a list of build steps, not {shown(value)}.")
    if len(value) > MAXIMUM_STEPS:
        raise TaskFamilyError(f"{where} has {len(value)} build steps; at most {MAXIMUM_STEPS} are allowed.")
    return tuple(_step(step, f"{where}, step {number}") for number, step in enumerate(value, start=1))


def _step(value: object, where: str) -> BuildStep:
    if not isinstance(value, dict):
        raise TaskFamilyError(f"{where} must be an object, not {shown(value)}.")
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in _KEYS:
        raise TaskFamilyError(f'{where}: type must be "shell" or "file", not {shown(kind)}.')
    if missing := _KEYS[kind] - value.keys():
        raise TaskFamilyError(f"{where}: a {kind} step needs {', '.join(sorted(missing))}.")
    if unknown := value.keys() - _KEYS[kind]:
        raise TaskFamilyError(f"{where}: unknown key {shown(min(unknown, key=str))} in a {kind} step.")
    if kind == "shell":
        return ShellBuildStep(type="shell", commands=_commands(value["commands"], where))
    source, destination = (_path(value[key], f"{where}: {key}") for key in ("source", "destination"))
    return FileBuildStep(type="file", source=source, destination=destination)


def _commands(value: object, where: str) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        raise TaskFamilyError(f"{where}: commands must be a list of strings, not {shown(value)}.")
    for number, command in enumerate(value, start=1):
        if not isinstance(command, str):
            raise TaskFamilyError(f"{where}: command {number} must be a string, not {shown(command)}.")
        if "\0" in command or not is_unicode(command):
            raise TaskFamilyError(f"{where}: command {number} contains a character that no command can hold.")
    return tuple(value)


def _path(value: object, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise TaskFamilyError(f"{where} must be a path, not {shown(value)}.")
    if len(value) > MAXIMUM_PATH_CHARACTERS:
        raise TaskFamilyError(f"{where} is longer than {MAXIMUM_PATH_CHARACTERS} characters.")
    if "\0" in value or not is_unicode(value):
        raise TaskFamilyError(f"{where} contains a character that no path can hold: {shown(value)}.")
    return value


def is_unicode(text: str) -> bool:
    """Returns whether text can be encoded: JSON may contain half a surrogate pair."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


@explained("build-steps")
def check_build_steps(steps: Iterable[BuildStep], family_directory: Path, where: str = "build_steps") -> None:
    """Checks that the source of every file step exists and stays inside the family directory, links included.

    Args:
        steps: the steps of build_steps.json or of an aux VM's spec.
        family_directory: the directory that sources are relative to.
        where: the name that messages use for the steps.

    Raises:
        TaskFamilyError: a source is missing, leads out of the family directory, or is never copied.
    """
    root = family_directory.resolve()
    for number, step in enumerate(steps, start=1):
        if isinstance(step, FileBuildStep):
            _check_source(step.source, root, f"{where}, step {number}: source {shown(step.source)}")


def _check_source(source: str, root: Path, where: str) -> None:
    if PurePosixPath(source).is_absolute():
        raise TaskFamilyError(f"{where} is absolute; make it relative to the family directory.")
    try:
        resolved = (root / source).resolve(strict=True)
    except (OSError, RuntimeError):
        # Distinguish a path that leads out from one that is only missing, without looking outside.
        leads_out = os.path.normpath(source).partition("/")[0] == ".."
        problem = "leads out of the family directory" if leads_out else "does not exist"
        raise TaskFamilyError(f"{where} {problem}.") from None
    # Path components are compared, not characters: /a/family_evil does not lie in /a/family.
    if not resolved.is_relative_to(root):
        raise TaskFamilyError(f"{where} leads out of the family directory.")
    if is_skipped(resolved.relative_to(root)):
        raise TaskFamilyError(f"{where} is not copied into machines (caches, .git and .venv are left out).")
    if resolved.is_dir():
        list_files(root, resolved)
    elif not resolved.is_file():
        raise TaskFamilyError(f"{where} is neither a file nor a directory.")
