"""Opens the session of a command that works on a task family, after reading and checking the family's files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from provisioner.base.models import Destination
from provisioner.cli.options import Launch
from provisioner.cli.sessions import session
from provisioner.clouds.registry import Where
from provisioner.environment.allowlist import parse_destination, resolve
from provisioner.family.check import refuse_mistakes
from provisioner.family.loader import TaskFamily, load_family, refuse_env_file_inside
from provisioner.session import Session


def family_session(
    family: Path, env_file: Path | None, where: Where, launch: Launch | None = None
) -> tuple[Session, TaskFamily]:
    """Loads a family and opens a session for a command that works on it.

    Raises:
        TaskFamilyError: the family is not valid, or the env file is one of its files.
        UsageError: an option's value is not valid.
    """
    loaded = load_family(family)
    if env_file:
        refuse_env_file_inside(loaded, env_file)
    return session(env_file, where, launch), loaded


def checked_session(
    family: Path, task: str | None, env_file: Path | None, where: Where, launch: Launch
) -> tuple[Session, TaskFamily]:
    """Loads a family and opens a session for a command that creates machines; refuses a family that surely fails.

    Args:
        task: the task that is to be run; None for all.

    Raises:
        UsageError: the family has no such task, requires variables that are not set, or has other mistakes.
    """
    opened, loaded = family_session(family, env_file, where, launch)
    refuse_or_warn(opened, loaded, task)
    return opened, loaded


def refuse_or_warn(opened: Session, family: TaskFamily, task: str | None) -> None:
    """Refuses a family that surely fails, and says how many warnings `provisioner check` has of another.

    Args:
        task: the task that is to be run; None for all.

    Raises:
        UsageError: the family has no such task, requires variables that are not set, or has other mistakes.
    """
    if warnings := len(refuse_mistakes(family, task, opened.variables).findings):
        noun = "warning" if warnings == 1 else "warnings"
        opened.progress.note(f"{family.title} has {warnings} {noun}: `provisioner check FAMILY` shows them")


def builder_session(family: Path, env_file: Path | None, where: Where, launch: Launch) -> tuple[Session, TaskFamily]:
    """Loads a family and opens a session for a command that only builds images: the builders get its ttl."""
    opened, loaded = family_session(family, env_file, where, launch)
    return replace(opened, builder_ttl=opened.ttl), loaded


def destinations(allow: list[str] | None) -> tuple[Destination, ...]:
    """Parses the allowlist and resolves its names."""
    return resolve([parse_destination(text) for text in allow or []])
