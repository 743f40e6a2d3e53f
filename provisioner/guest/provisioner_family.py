"""Implements the operations that call the family's TaskFamily class. Returns its values unchecked."""

from __future__ import annotations

import datetime
import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import provisioner_result
from provisioner_request import Request
from provisioner_result import OperationError


def load_family(name: str) -> Any:
    """Import the family's module and return its class.

    Raises:
        OperationError: the module has no class TaskFamily.
    """
    if not name.isidentifier():
        raise OperationError("invalid", f"{name!r} is not the name of a task family")
    family = getattr(importlib.import_module(name), "TaskFamily", None)
    if family is None:
        raise OperationError("invalid", f"{name}.py has no class TaskFamily")
    return family


def _tasks(family: Any) -> dict[Any, Any]:
    tasks = family.get_tasks()
    if not isinstance(tasks, dict):
        raise OperationError("invalid", f"get_tasks() must return a dict of tasks, not a {type(tasks).__name__}")
    return tasks


def _task(family: Any, name: str | None) -> Any:
    tasks = _tasks(family)
    if name not in tasks:
        raise OperationError("invalid", f"get_tasks() does not name the task {name!r}")
    return tasks[name]


def _function(family: Any, name: str) -> Callable[..., Any]:
    function = getattr(family, name, None)
    if function is None:
        raise OperationError("invalid", f"the task family has no {name}()")
    return function  # type: ignore[no-any-return]


def install(request: Request) -> None:
    """Call install(), if the family has it."""
    family = load_family(request.family)
    if hasattr(family, "install"):
        family.install()


def start(request: Request) -> None:
    """Call start(task), if the family has it."""
    family = load_family(request.family)
    task = _task(family, request.task)
    if hasattr(family, "start"):
        family.start(task)


def score(request: Request) -> Any:
    """Call score(task, submission).

    Options:
        submission: path of the file with the submission, which the controller has written.
    """
    # newline="" keeps the submission's line ends unchanged.
    with open(request.option("submission", str), encoding="utf-8", errors="replace", newline="") as file:
        submission = file.read()
    family = load_family(request.family)
    return _function(family, "score")(_task(family, request.task), submission)


def intermediate_score(request: Request) -> Any:
    """Call intermediate_score(task)."""
    family = load_family(request.family)
    return _function(family, "intermediate_score")(_task(family, request.task))


def aggregate_scores(request: Request) -> Any:
    """Call aggregate_scores(task, score_log).

    Options:
        score_log: path of a JSON file, a list of entries with score, message, details, scored_at (ISO 8601) and
            elapsed_seconds.
    """
    entries = json.loads(Path(request.option("score_log", str)).read_text(encoding="utf-8"))
    family = load_family(request.family)
    return _function(family, "aggregate_scores")(
        _task(family, request.task), [score_log_entry(entry) for entry in entries]
    )


def score_log_entry(entry: dict[str, Any]) -> dict[str, Any]:
    """Convert an entry to the standard's types: scored_at as a UTC datetime, and the older keys in milliseconds."""
    moment = datetime.datetime.fromisoformat(entry["scored_at"])
    moment = moment.replace(tzinfo=moment.tzinfo or datetime.UTC).astimezone(datetime.UTC)
    milliseconds = int(moment.timestamp() * 1000)
    older = {"scoredAt": milliseconds, "createdAt": milliseconds}
    if "elapsed_seconds" in entry:
        older["elapsedTime"] = int(entry["elapsed_seconds"] * 1000)
    return {**older, **entry, "scored_at": moment}


def teardown(request: Request) -> None:
    """Call teardown(task), or teardown() as older families define it, if the family has it."""
    family = load_family(request.family)
    function = getattr(family, "teardown", None)
    if function is None:
        return
    if inspect.signature(function).parameters:
        function(_task(family, request.task))
    else:
        function()


def setup(request: Request) -> dict[str, Any]:
    """Read the setup data of all tasks, repeatedly in fresh processes, until they require no further variables.

    A family may leave tasks out while a variable is missing. So the first pass sets none of the user's variables, the
    next ones set those that the tasks required, and all of them are set if the family cannot be read otherwise.

    Options:
        given: the user's variables.
    """
    variables = request.option("given", dict)
    names: set[str] = set()
    while True:
        result = _read_afresh(request, {name: variables[name] for name in names})
        required = set(variables) if result["status"] == "error" else _required(result["value"]) & set(variables)
        if required <= names:
            break
        names |= required
    if result["status"] == "error":
        error = OperationError("", "")
        error.result = result
        raise error
    return result["value"]  # type: ignore[no-any-return]


def _required(value: dict[str, Any]) -> set[str]:
    lists = [task["required_environment_variables"] for task in value["tasks"].values()]
    return {name for names in lists if isinstance(names, list) for name in names if isinstance(name, str)}


def _read_afresh(request: Request, variables: dict[str, str]) -> dict[str, Any]:
    """Read the setup data in a fork of this process, in which the family is not imported yet."""
    path = request.result.with_name(request.result.name + ".setup")
    provisioner_result.discard(path)
    pid = os.fork()
    if pid == 0:
        try:
            _read_and_write(request.family, variables, path)
        finally:
            os._exit(0)  # whatever happens, the child must not continue as the parent does
    exit_code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if not provisioner_result.is_written(path):
        return provisioner_result.ended(exit_code)
    result = json.loads(path.read_bytes())
    provisioner_result.discard(path)
    return result  # type: ignore[no-any-return]


def _read_and_write(name: str, variables: dict[str, str], path: Path) -> None:
    own_pid = os.getpid()

    def read() -> dict[str, Any]:
        os.environ.update(variables)
        return read_setup(name)

    result = provisioner_result.result_of(read)
    if os.getpid() == own_pid:  # otherwise task code forked, and its child came back here
        provisioner_result.write(path, result)
    sys.stdout.flush()
    sys.stderr.flush()


def read_setup(name: str) -> dict[str, Any]:
    """Import the family and read the setup data of every task.

    Raises:
        OperationError: the family has score() and aggregate_scores(), but no intermediate_score().
    """
    family = load_family(name)
    if hasattr(family, "score") and hasattr(family, "aggregate_scores") and not hasattr(family, "intermediate_score"):
        message = "the task family has both score() and aggregate_scores(), but no intermediate_score() to aggregate"
        raise OperationError("invalid", message)
    warnings = []
    if not hasattr(family, "get_instructions"):
        warnings.append("the task family has no get_instructions(): every task's instructions are empty")
    return {
        "standard_version": getattr(family, "standard_version", None),
        "tasks": {name: _task_setup(family, name, task) for name, task in _tasks(family).items()},
        "has_score": hasattr(family, "score"),
        "has_intermediate_score": hasattr(family, "intermediate_score"),
        "has_aggregate_scores": hasattr(family, "aggregate_scores"),
        "has_teardown": hasattr(family, "teardown"),
        "skip_chown_after_start": bool(getattr(family, "skip_chown_after_start", False)),
        "warnings": warnings,
    }


def _task_setup(family: Any, name: object, task: Any) -> dict[str, Any]:
    required = getattr(family, "required_environment_variables", None) or []
    try:
        return {
            "permissions": family.get_permissions(task) if hasattr(family, "get_permissions") else [],
            "instructions": family.get_instructions(task) if hasattr(family, "get_instructions") else "",
            "required_environment_variables": sorted(required) if isinstance(required, set | frozenset) else required,
            "aux_vm_spec": family.get_aux_vm_spec(task) if hasattr(family, "get_aux_vm_spec") else None,
        }
    except Exception as error:
        error.add_note(f"This happened while the setup data of the task {name!r} was read.")
        raise
