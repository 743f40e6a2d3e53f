"""Checks the setup data and the aux VM that a machine returned: untrusted JSON becomes a record or a clear error."""

from __future__ import annotations

import difflib
import itertools
import math
import unicodedata
from collections.abc import Iterable
from typing import Any, get_args

from provisioner.base.errors import TaskFamilyError, UsageError, explained
from provisioner.base.models import Architecture, AuxDistribution, GpuSpec, SetupData, TaskSetup, VMSpec
from provisioner.base.printable import printable
from provisioner.base.validation import listed, shown
from provisioner.family.build_steps import is_unicode, parse_build_steps
from provisioner.family.env_file import is_variable_name

MAXIMUM_MODEL_CHARACTERS = 64

_REQUIRED = {"cpu_count_range", "ram_gib_range"}
_KEYS = _REQUIRED | {"cpu_architecture", "gpu_spec", "base_image_type", "build_steps"}


@explained("vmspec")
def parse_vm_spec(value: object, where: str) -> VMSpec:
    """Converts decoded JSON to a VMSpec. Optional keys may also be null.

    Args:
        value: the decoded JSON.
        where: the name that messages use for it.

    Raises:
        TaskFamilyError: the value is not a VMSpec, or no machine could satisfy it.
    """
    spec = _object(value, where, _REQUIRED, _KEYS)
    gpu = None if spec.get("gpu_spec") is None else _gpu(spec["gpu_spec"], f"{where}.gpu_spec")
    image = _one_of(spec, "base_image_type", AuxDistribution, where) or "debian-12"
    if image == "ubuntu-20.04-cuda" and gpu is None:
        raise TaskFamilyError(f"{where}: base_image_type ubuntu-20.04-cuda needs a gpu_spec.")
    steps = spec.get("build_steps")
    return VMSpec(
        cpu_count_range=_range(spec["cpu_count_range"], f"{where}.cpu_count_range"),
        ram_gib_range=_range(spec["ram_gib_range"], f"{where}.ram_gib_range"),
        cpu_architecture=_one_of(spec, "cpu_architecture", Architecture, where),
        gpu_spec=gpu,
        base_image_type=image,
        build_steps=() if steps is None else parse_build_steps(steps, f"{where}.build_steps"),
    )


def _object(value: object, where: str, required: set[str], allowed: set[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TaskFamilyError(f"{where} must be an object, not {shown(value)}.")
    if unknown := value.keys() - allowed:
        raise TaskFamilyError(f"{where} has the unknown key {shown(min(unknown, key=str))}.")
    if missing := sorted(key for key in required if value.get(key) is None):
        raise TaskFamilyError(f"{where} lacks {', '.join(missing)}.")
    return value


def _range(value: object, where: str) -> tuple[float, float]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise TaskFamilyError(f"{where} must be a pair [low, high], not {shown(value)}.")
    low, high = (_number(end, where) for end in value)
    if low > high:
        raise TaskFamilyError(f"{where} is reversed: {low:g} is more than {high:g}.")
    return low, high


def _number(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TaskFamilyError(f"{where} must hold numbers, not {shown(value)}.")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise TaskFamilyError(f"{where} must hold finite numbers, not {shown(value)}.")
    if number <= 0:
        raise TaskFamilyError(f"{where} must hold numbers above 0, not {number:g}.")
    return number


def _gpu(value: object, where: str) -> GpuSpec:
    spec = _object(value, where, {"count_range", "model"}, {"count_range", "model"})
    low, high = _range(spec["count_range"], f"{where}.count_range")
    if not (low.is_integer() and high.is_integer()):
        raise TaskFamilyError(f"{where}.count_range must hold whole numbers, not {low:g} and {high:g}.")
    model = spec["model"]
    if not isinstance(model, str) or not 0 < len(model) <= MAXIMUM_MODEL_CHARACTERS or not model.isprintable():
        raise TaskFamilyError(f"{where}.model must be the name of a GPU, not {shown(model)}.")
    return GpuSpec(count_range=(int(low), int(high)), model=model)


def _one_of(spec: dict[str, Any], key: str, literal: object, where: str) -> Any:
    """Returns the value of a key that may be missing, and must be one of a literal's."""
    value, allowed = spec.get(key), get_args(literal)
    if value is None or (isinstance(value, str) and value in allowed):
        return value
    raise TaskFamilyError(f"{where}.{key} must be one of {', '.join(allowed)}, not {shown(value)}.")


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


@explained("methods")
def parse_setup_data(value: object) -> SetupData:
    """Converts a decoded JSON object with SetupData's keys to a SetupData.

    Names and instructions may contain shell, HCL or template syntax: they are treated as data everywhere.

    Raises:
        TaskFamilyError: the Task Standard does not allow this setup data.
    """
    value = _object(value, _WHERE, set(), set(SetupData.model_fields))
    flags = {name: value.get(name, False) for name in _FLAGS}
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TaskFamilyError(f"{_WHERE}: {name} must be true or false, not {shown(flag)}.")
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


def _version(value: object) -> str | None:
    """Returns the version as text, shortened: it is recorded, not enforced, so any value is accepted."""
    plain = isinstance(value, str) and len(value) <= MAXIMUM_VERSION_CHARACTERS and value.isprintable()
    return None if value is None else str(value) if plain else shown(value)


def _warnings(value: object, where: str, maximum: int, characters: int) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > maximum:
        raise TaskFamilyError(f"{where}: warnings must be a list of at most {maximum}, not {shown(value)}.")
    if any(not isinstance(warning, str) or not is_unicode(warning) for warning in value):
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
    value = _object(value, where, set(), set(TaskSetup.model_fields))
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
    if not is_unicode(value):
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
