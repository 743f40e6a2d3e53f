"""Reads, checks and describes a task family's directory. Never imports or runs its code."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import islice
from pathlib import Path

from provisioner.base.errors import TaskFamilyError, explained
from provisioner.base.models import BuildStep, Role, ShellBuildStep
from provisioner.base.validation import shown
from provisioner.family.build_steps import load_build_steps, with_reads
from provisioner.family.files import list_files, matching
from provisioner.family.manifest import Manifest, load_manifest
from provisioner.family.source import check_module

MAXIMUM_NAME_CHARACTERS = 64
# How many entries of a directory are searched for the family that a wrong path may mean.
ENTRIES_SEARCHED = 1000

_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True)
class TaskFamily:
    """A task family whose directory has passed all checks.

    Args:
        directory: the resolved path.
        name: the directory's name, in snake case.
        module: the path of its NAME.py.
        manifest: from manifest.yaml, or the defaults.
        build_steps: from build_steps.json, or none.
        files: the files to copy into machines: sorted paths relative to `directory`, of regular files and of links
            that stay inside. family.files.SKIPPED_NAMES, SKIPPED_AT_TOP and empty directories are left out.
        hostname: its machine's host name; empty for its role. Only our own families have one.
        neighbours: further machines of each environment, by role. Each gets the image of its family, whose code does
            not run there. Only our own families have any.
    """

    directory: Path
    name: str
    module: Path
    manifest: Manifest
    build_steps: tuple[BuildStep, ...]
    files: tuple[str, ...]
    hostname: str = ""
    neighbours: Mapping[Role, TaskFamily] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """What messages call it: its name, or the machine that it is made for."""
        return f"machine {self.hostname}" if self.hostname else self.name

    @property
    def install_files(self) -> tuple[str, ...]:
        """The files that install() sees: the module and those that the manifest names, or all."""
        if self.manifest.install_inputs is None:
            return self.files
        named = {*matching(self.manifest.install_inputs, self.files), self.module.name}
        return tuple(name for name in self.files if name in named)

    def files_of(self, step: BuildStep) -> tuple[str, ...]:
        """Returns the files that a build step copies, or that its commands read, relative to the directory.

        A source that is a link stands for the file to which it leads: that is what the step copies.
        """
        if isinstance(step, ShellBuildStep):
            return tuple(name for name in self.files if name.partition("/")[0] in step.reads)
        path = self.directory / step.source
        if path.is_dir():
            return list_files(self.directory, path)
        return (os.path.relpath(path.resolve(), self.directory),)


def load_family(path: Path) -> TaskFamily:
    """Loads and checks a task family.

    Args:
        path: the family's directory. If it is a link, the family takes the link's name.

    Raises:
        TaskFamilyError: the directory is not a valid task family; the message names the file and the problem.
    """
    directory, name, files = locate_family(path)
    module = directory / f"{name}.py"
    check_module(module)
    steps = with_reads(load_build_steps(directory), directory, files)
    return TaskFamily(directory, name, module, load_manifest(directory), steps, files)


def locate_family(path: Path) -> tuple[Path, str, tuple[str, ...]]:
    """Checks a family's directory, but not what its files hold.

    Returns:
        the resolved directory, the family's name, and the files to copy into machines.

    Raises:
        TaskFamilyError: there is no such directory, its name or a file in it is not allowed, or it has no NAME.py.
    """
    path = path.resolve() if ".." in path.parts else path.absolute()
    if not path.is_dir():
        problem = "is not a directory" if path.exists() else "does not exist"
        near = _family_near(path)
        hint = f"Perhaps {near}?" if near else None
        raise TaskFamilyError(f"{path} {problem}: a task family is a directory NAME with a file NAME.py.", hint=hint)
    with explained("files"):
        name = family_name(path)
        directory = path.resolve()
        files = list_files(directory)  # first, so that whatever is read below is a regular file or a link to one
        if not (directory / f"{name}.py").is_file():
            inside = _families_in(path)
            hint = f"There are families in it, such as {inside[0]}." if inside else None
            raise TaskFamilyError(f"{path} has no {name}.py, the module that a family of this name needs.", hint=hint)
        return directory, name, files


def _family_near(path: Path) -> Path | None:
    """Returns the family that a path may mean: the one that holds it, or one beside it with a similar name."""
    if _is_family(path.parent):
        return path.parent
    names = [each.name for each in _families_in(path.parent)]
    return next((path.parent / name for name in get_close_matches(path.name, names, n=1)), None)


def _families_in(directory: Path) -> list[Path]:
    try:
        return sorted(filter(_is_family, islice(directory.iterdir(), ENTRIES_SEARCHED)))
    except OSError:
        return []


def _is_family(path: Path) -> bool:
    try:
        return (path / f"{path.name}.py").is_file()
    except OSError:  # such as a name that leaves no room for .py
        return False


def family_name(path: Path) -> str:
    """Returns the name of the family in a directory.

    Raises:
        TaskFamilyError: the directory's name is not a valid family name.
    """
    name = path.absolute().name
    if not _NAME.fullmatch(name):
        raise TaskFamilyError(
            f"The directory's name {shown(name)} is not a valid family name: use a lower-case letter, followed by "
            "lower-case letters, digits and _."
        )
    if len(name) > MAXIMUM_NAME_CHARACTERS:
        raise TaskFamilyError(f"The family's name {shown(name)} has over {MAXIMUM_NAME_CHARACTERS} characters.")
    return name


def refuse_env_file_inside(family: TaskFamily, env_file: Path) -> None:
    """Checks that the env file is not one of the files that would be copied into the image, secrets and all.

    Raises:
        TaskFamilyError: the env file is one of the family's files.
    """
    resolved = env_file.resolve()
    if any((family.directory / name).resolve() == resolved for name in family.files):
        raise TaskFamilyError(
            f"The env file {env_file} is one of the family's files, so its secrets would be copied into the image.",
            hint="Move it out of the family's directory.",
        )
