"""Checks the setup data that a machine returned: converts untrusted JSON to a SetupData or raises a clear error."""

from __future__ import annotations

import difflib
import itertools
import unicodedata
from collections.abc import Iterable

from provisioner.errors import TaskFamilyError, UsageError
from provisioner.family.env_file import is_variable_name
from provisioner.family.explained import METHODS, explained
from provisioner.family.vm_spec import parse_vm_spec
from provisioner.models import SetupData, TaskSetup
from provisioner.printable import printable
from provisioner.validation import listed, shown

MAXIMUM_TASKS = 10_000
MAXIMUM_TASK_NAME_CHARACTERS = 256
MAXIMUM_INSTRUCTIONS_BYTES = 1 << 20
MAXIMUM_VARIABLES = 1000
MAXIMUM_WARNINGS = 1000
MAXIMUM_TASK_WARNINGS = 2
MAXIMUM_TASK_WARNING_CHARACTERS = 2048
MAXIMUM_WARNING_CHARACTERS = 4096
MAXIMUM_VERSION_CHARACTERS = 64
# Names beyond this many characters in total are not compared. Comparing so many takes up to 0.3 s, as measured.
COMPARED_CHARACTERS = 200_000

_WHERE = "The family's setup data"
_FLAGS = ("has_score", "has_intermediate_score", "has_aggregate_scores", "has_teardown", "skip_chown_after_start")


@explained(METHODS)
def parse_setup_data(value: object) -> SetupData:
    """Converts a decoded JSON object with SetupData's keys to a SetupData.

    Names and instructions may contain shell, HCL or template syntax: they are treated as data everywhere.

    Raises:
        TaskFamilyError: the Task Standard does not allow this setup data.
    """
    if not isinstance(value, dict):
        raise TaskFamilyError(f"{_WHERE} must be an object, not {shown(value)}.")
    if unknown := value.keys() - SetupData.model_fields.keys():
        raise TaskFamilyError(f"{_WHERE} has the unknown key {shown(min(unknown, key=str))}.")
    flags = {name: _flag(value.get(name, False), name) for name in _FLAGS}
    if flags["has_score"] and flags["has_aggregate_scores"] and not flags["has_intermediate_score"]:
        raise TaskFamilyError("The family has both score and aggregate_scores, but no intermediate_score to aggregate.")
    return SetupData(
        standard_version=_version(value.get("standard_version")),
        tasks=_tasks(value.get("tasks")),
        warnings=_warnings(value.get("warnings", []), _WHERE, MAXIMUM_WARNINGS, MAXIMUM_WARNING_CHARACTERS),
        **flags,
    )


def require_task(setup: SetupData, family_name: str, task: str) -> TaskSetup:
    """Returns the setup data of one task.

    Raises:
        UsageError: the family has no such task; the message lists the nearest names.
    """
    if task in setup.tasks:
        return setup.tasks[task]
    raise unknown_task(family_name, task, setup.tasks)


def unknown_task(family_name: str, task: str, names: Iterable[str]) -> UsageError:
    """Returns the error for a task that a family does not have; it lists the nearest names."""
    names = list(names)
    near = closest(task, names)
    is_all = len(near) == len(names)
    which = "Its tasks are:" if is_all else "The nearest names are:"
    said = f" {which}{listed(shown(name) for name in near)}" if near else ""
    return UsageError(
        f"The family {family_name} has no task {shown(task)}.{said}",
        hint=None if is_all else "`provisioner tasks FAMILY` lists all tasks.",
    )


def closest(name: str, names: Iterable[str], count: int = 5) -> list[str]:
    """Returns at most `count` names similar to `name`, best first. Falls back to the first names if none is similar.

    Of very many names, the last ones are not compared.
    """
    candidates = list(names)
    lengths = itertools.accumulate(map(len, candidates))
    compared = [name for name, length in zip(candidates, lengths, strict=True) if length <= COMPARED_CHARACTERS]
    by_folded = {candidate.casefold(): candidate for candidate in reversed(compared)}
    similar = difflib.get_close_matches(name.casefold(), by_folded, n=count, cutoff=0.5)
    return [by_folded[folded] for folded in similar] or candidates[:count]


def _flag(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise TaskFamilyError(f"{_WHERE}: {name} must be true or false, not {shown(value)}.")
    return value


def _version(value: object) -> str | None:
    """Returns the version as text, shortened: it is recorded, not enforced, so any value is accepted."""
    plain = isinstance(value, str) and len(value) <= MAXIMUM_VERSION_CHARACTERS and value.isprintable()
    return None if value is None else str(value) if plain else shown(value)


def _warnings(value: object, where: str, maximum: int, characters: int) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > maximum:
        raise TaskFamilyError(f"{where}: warnings must be a list of at most {maximum}, not {shown(value)}.")
    if any(not isinstance(warning, str) or not _is_text(warning) for warning in value):
        raise TaskFamilyError(f"{where}: every warning must be a string.")
    return tuple(printable(warning)[:characters] for warning in value)


def _tasks(value: object) -> dict[str, TaskSetup]:
    if not isinstance(value, dict):
        raise TaskFamilyError(f"{_WHERE}: tasks must be an object of names and tasks, not {shown(value)}.")
    if not value:
        raise TaskFamilyError("The family has no tasks: get_tasks returned an empty dict.")
    if len(value) > MAXIMUM_TASKS:
        raise TaskFamilyError(f"The family has {len(value)} tasks; at most {MAXIMUM_TASKS} are allowed.")
    return {_task_name(name): _task(name, task) for name, task in value.items()}


def _task_name(name: object) -> str:
    if not isinstance(name, str):
        raise TaskFamilyError(f"A task's name must be a string, not {shown(name)}.")
    if not name.strip():
        raise TaskFamilyError("A task's name is empty.")
    if len(name) > MAXIMUM_TASK_NAME_CHARACTERS:
        raise TaskFamilyError(f"The task name {shown(name)} has over {MAXIMUM_TASK_NAME_CHARACTERS} characters.")
    if any(unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") for character in name):
        raise TaskFamilyError(f"The task name {shown(name)} contains control characters.")
    return name


def _task(name: str, value: object) -> TaskSetup:
    where = f"Task {shown(name)}"
    if not isinstance(value, dict):
        raise TaskFamilyError(f"{where} must be an object, not {shown(value)}.")
    if unknown := value.keys() - TaskSetup.model_fields.keys():
        raise TaskFamilyError(f"{where} has the unknown key {shown(min(unknown, key=str))}.")
    spec = value.get("aux_vm_spec")
    return TaskSetup(
        permissions=("full_internet",) if _is_online(value.get("permissions", []), where) else (),
        instructions=_instructions(value.get("instructions", ""), where),
        required_environment_variables=_variables(value.get("required_environment_variables", []), where),
        aux_vm_spec=None if spec is None else parse_vm_spec(spec, f"{where}: aux_vm_spec"),
        warnings=_warnings(value.get("warnings", []), where, MAXIMUM_TASK_WARNINGS, MAXIMUM_TASK_WARNING_CHARACTERS),
    )


def _is_online(value: object, where: str) -> bool:
    # Anything else must fail: a misspelt permission would silently be an offline task, or worse, an online one.
    if not isinstance(value, list) or value not in ([], ["full_internet"]):
        said = f"[{', '.join(shown(item) for item in value[:3])}]" if isinstance(value, list) else shown(value)
        raise TaskFamilyError(f'{where}: permissions must be exactly [] or ["full_internet"], not {said}.')
    return bool(value)


def _instructions(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise TaskFamilyError(f"{where}: instructions must be a string, not {shown(value)}.")
    if not _is_text(value):
        raise TaskFamilyError(f"{where}: instructions contain a lone surrogate, which is half a character.")
    if len(value.encode()) > MAXIMUM_INSTRUCTIONS_BYTES:
        raise TaskFamilyError(f"{where}: instructions are larger than {MAXIMUM_INSTRUCTIONS_BYTES} bytes.")
    return value


def _variables(value: object, where: str) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise TaskFamilyError(f"{where}: required_environment_variables must be a list of names, not {shown(value)}.")
    if len(value) > MAXIMUM_VARIABLES:
        raise TaskFamilyError(f"{where} requires over {MAXIMUM_VARIABLES} environment variables.")
    for name in value:
        if not isinstance(name, str) or not is_variable_name(name):
            raise TaskFamilyError(f"{where}: {shown(name)} is not the name of an environment variable.")
    return tuple(dict.fromkeys(value))


def _is_text(text: str) -> bool:
    """Returns whether text can be encoded as UTF-8: JSON may contain half a surrogate pair."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
