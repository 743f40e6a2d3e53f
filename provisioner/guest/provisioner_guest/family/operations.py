"""Implements the operations that call the family's TaskFamily class. Returns its values unchecked."""

from __future__ import annotations

import contextlib
import datetime
import importlib
import inspect
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from provisioner_guest.family import results
from provisioner_guest.family.request import Request, as_json, python_command
from provisioner_guest.family.results import MAX_BYTES, OperationError, fingerprint

HELPER = str(Path(__file__).parents[2] / "helper.py")
COLLECTIONS = (list, tuple, set, frozenset)
# Those of which the setup data has what they return, under their names without "get_".
SETUP_FUNCTIONS = ("get_permissions", "get_instructions", "get_aux_vm_spec")
# Supplied by the controller to a task with an aux VM, as in provisioner/family/env_file.py.
AUX_VM_VARIABLES = ("VM_SSH_USERNAME", "VM_SSH_PRIVATE_KEY", "VM_IP_ADDRESS")
# If all tasks together have more fields, each task has one fingerprint. So many fit into a file of MAX_BYTES, even if
# each character of their names is escaped.
MAXIMUM_FIELDS, FIELD_CHARACTERS = 20_000, 30
LONG_NAME = "a field with a long name"
NAME_CHARACTERS, FIELDS_SHOWN, TASKS_SHOWN = 100, 10, 20
DIFFERS = (
    "The agent may be told one task and scored on another. Each call must succeed and return the same tasks: use a "
    "fixed seed for random values."
)


def load_family(name: str) -> Any:
    """Imports the family's module and returns its class.

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


def install(request: Request) -> None:
    """Calls install(), if the family has it."""
    family = load_family(request.family)
    if hasattr(family, "install"):
        family.install()


def start(request: Request) -> None:
    """Calls start(task), if the family has it."""
    family = load_family(request.family)
    task = _task(family, request.task)
    if hasattr(family, "start"):
        family.start(task)


def score(request: Request) -> Any:
    """Calls score(task, submission).

    Options:
        submission: path of the file with the submission, which the controller has written.
    """
    # newline="" keeps the submission's line ends unchanged.
    with open(request.option("submission", str), encoding="utf-8", errors="replace", newline="") as file:
        submission = file.read()
    return _score(request, "score", submission)


def intermediate_score(request: Request) -> Any:
    """Calls intermediate_score(task)."""
    return _score(request, "intermediate_score")


def aggregate_scores(request: Request) -> Any:
    """Calls aggregate_scores(task, score_log).

    Options:
        score_log: path of a JSON file, a list of entries with score, message, details, scored_at (ISO 8601) and
            elapsed_seconds.
    """
    entries = json.loads(Path(request.option("score_log", str)).read_text(encoding="utf-8"))
    return _score(request, "aggregate_scores", [_score_log_entry(entry) for entry in entries])


def _score(request: Request, name: str, *arguments: Any) -> Any:
    family = load_family(request.family)
    function = getattr(family, name, None)
    if function is None:
        raise OperationError("invalid", f"the task family has no {name}()")
    return function(_task(family, request.task), *arguments)


def _score_log_entry(entry: dict[str, Any]) -> dict[str, Any]:
    """Converts an entry to the standard's types: scored_at as a UTC datetime, and the older keys in milliseconds."""
    moment = datetime.datetime.fromisoformat(entry["scored_at"])
    moment = moment.replace(tzinfo=moment.tzinfo or datetime.UTC).astimezone(datetime.UTC)
    milliseconds = int(moment.timestamp() * 1000)
    older = {"scoredAt": milliseconds, "createdAt": milliseconds}
    if "elapsed_seconds" in entry:
        older["elapsedTime"] = int(entry["elapsed_seconds"] * 1000)
    return {**older, **entry, "scored_at": moment}


def teardown(request: Request) -> None:
    """Calls teardown(task), or teardown() as older families define it, if the family has it."""
    family = load_family(request.family)
    function = getattr(family, "teardown", None)
    if function is None:
        return
    if inspect.signature(function).parameters:
        function(_task(family, request.task))
    else:
        function()


def setup(request: Request) -> dict[str, Any]:
    """Reads the setup data of all tasks in new processes: with the required variables, and again, to compare the two.

    The class says which variables it requires. Those that the user gave are set before get_tasks is called. All of them
    are set if the family cannot be read otherwise.

    Options:
        given: the user's variables.
    """
    given = request.option("given", dict)
    variables: dict[str, str] = {}
    while True:
        result = _read_afresh(request, variables, given)
        names = given.keys() if result["status"] == "error" else result["value"]["missing"]
        if variables.keys() >= set(names):
            break
        variables |= {name: given[name] for name in names}
    if result["status"] == "error":
        error = OperationError("", "")
        error.result = result
        raise error
    first: dict[str, Any] = result["value"]
    del first["missing"]
    _compare(first, result["fingerprints"], _read_afresh(request, variables, given))
    return first


def _read_afresh(request: Request, variables: dict[str, str], given: dict[str, str]) -> dict[str, Any]:
    """Reads the setup data in a new interpreter, and returns the result of read_setup, with its "fingerprints"."""
    path = request.result.with_name(request.result.name + ".setup")
    files = (path, _fingerprints_path(path))
    unset = [name for name in given if name not in variables]
    read = replace(request, operation="read_setup", result=path, environment={}, options={"unset": unset})
    for file in files:
        results.discard(file)
    sys.stdout.flush()
    with os.fdopen(os.memfd_create("request"), "w+b") as stdin:
        stdin.write(as_json(read))
        stdin.seek(0)
        command = [*python_command(), "-u", HELPER, "child"]
        exit_code = subprocess.run(command, stdin=stdin, env={**os.environ, **variables}, check=False).returncode
    result, fingerprints = (results.read(file) for file in files)
    for file in files:
        results.discard(file)
    if not isinstance(result, dict):
        return results.ended(exit_code)
    if result["status"] == "ok":
        result["fingerprints"] = fingerprints if isinstance(fingerprints, dict) else {}
    return result


def _fingerprints_path(result: Path) -> Path:
    return result.with_name(result.name + ".fingerprints")


def read_setup(request: Request) -> dict[str, Any]:
    """Imports the family and reads the setup data of every task. Writes the tasks' fingerprints to a file of their own.

    They are not in the result, which would be too large in the end.

    Options:
        unset: the names of variables that the user gave, and that are not set in this process.

    Returns:
        the setup data; and "missing", those of the unset variables that the class requires, and nothing else if there
        are any.

    Raises:
        OperationError: the family has score() and aggregate_scores(), but no intermediate_score(); or it has no tasks
            without its variables.
    """
    pid = os.getpid()
    family = load_family(request.family)
    required = _required(family)
    if missing := [name for name in request.option("unset", list) if name in required]:
        return {"missing": missing}
    if hasattr(family, "score") and hasattr(family, "aggregate_scores") and not hasattr(family, "intermediate_score"):
        message = "the task family has both score() and aggregate_scores(), but no intermediate_score() to aggregate"
        raise OperationError("invalid", message)
    warnings = []
    if not hasattr(family, "get_instructions"):
        warnings.append("the task family has no get_instructions(): every task's instructions are empty")
    tasks = _tasks(family)
    if not tasks and (absent := [name for name in required if name not in (*os.environ, *AUX_VM_VARIABLES)]):
        message = f"get_tasks() returns no tasks while these required variables are not set: {', '.join(absent)}"
        raise OperationError("invalid", message)
    setups = {name: _task_setup(family, name, task) for name, task in tasks.items()}
    # They are only for a warning: nothing that prevents it may fail the build. A child that task code forked has none.
    with contextlib.suppress(Exception):
        if os.getpid() == pid:
            results.write(_fingerprints_path(request.result), _fingerprints(tasks, setups))
    return {
        "standard_version": getattr(family, "standard_version", None),
        "tasks": setups,
        "has_score": hasattr(family, "score"),
        "has_intermediate_score": hasattr(family, "intermediate_score"),
        "has_aggregate_scores": hasattr(family, "aggregate_scores"),
        "has_teardown": hasattr(family, "teardown"),
        "skip_chown_after_start": bool(getattr(family, "skip_chown_after_start", False)),
        "warnings": warnings,
        "missing": [],
    }


def _required(family: Any) -> list[str]:
    """Returns the names in the class's list of required variables, as far as it is one."""
    names = getattr(family, "required_environment_variables", None)
    return sorted({name for name in names if isinstance(name, str)}) if isinstance(names, COLLECTIONS) else []


def _task_setup(family: Any, name: object, task: Any) -> dict[str, Any]:
    required = getattr(family, "required_environment_variables", None) or []
    try:
        return {
            "permissions": family.get_permissions(task) if hasattr(family, "get_permissions") else [],
            "instructions": family.get_instructions(task) if hasattr(family, "get_instructions") else "",
            "required_environment_variables": sorted(required) if isinstance(required, (set, frozenset)) else required,
            "aux_vm_spec": family.get_aux_vm_spec(task) if hasattr(family, "get_aux_vm_spec") else None,
        }
    except Exception as error:
        error.add_note(f"This happened while the setup data of the task {name!r} was read.")
        raise


def _fingerprints(tasks: dict[Any, Any], setups: dict[Any, dict[str, Any]]) -> dict[str, list[Any]]:
    """Returns hashes of each task, by its name's hash: one of the whole task, and those of its fields if they are few.

    Only hashes: the values may be large, or secret.
    """
    hashes = {}
    for name, task in tasks.items():
        fields: dict[str, Any] = {f"{key}()": setups[name][key[4:]] for key in SETUP_FUNCTIONS}
        if isinstance(task, dict) and all(isinstance(key, str) for key in task):
            for key, value in task.items():
                # Half a name may be half a secret, which the controller would not know.
                field = repr(key) if len(key) <= FIELD_CHARACTERS else LONG_NAME
                fields.setdefault(field, {})[key] = value
        else:
            fields["the task's value"] = task
        hashes[fingerprint(str(name))] = {field: _fingerprint(value) for field, value in fields.items()}
    few = sum(map(len, hashes.values())) <= MAXIMUM_FIELDS
    return {name: [fingerprint(fields), fields if few else None] for name, fields in hashes.items()}


def _fingerprint(value: object) -> str:
    with contextlib.suppress(Exception):  # it is too large, or its own methods fail
        return fingerprint(value)
    return ""


def _compare(first: dict[str, Any], fingerprints: dict[str, Any], second: dict[str, Any]) -> None:
    """Adds warnings to setup data that was read: of each task that was another one when it was read again.

    They never make the setup data larger than a result may be.

    Args:
        second: the result of the second reading.
    """
    problems = {}
    read_again = second["value"].get("tasks") if second["status"] == "ok" else None
    for name in first["tasks"]:
        key = fingerprint(name)
        if read_again is None:
            problems[name] = f"The task {_shown(name)} was read twice, and the second time failed."
        elif name not in read_again:
            problems[name] = _only_once(name)
        elif different := _different(fingerprints.get(key), second["fingerprints"].get(key)):
            problems[name] = f"The task {_shown(name)} was read twice, and differs in: {different}."
    others = [_only_once(name) for name in read_again or () if name not in first["tasks"]]
    warnings = [(first, f"{len(problems)} tasks may differ at each call.")] if len(problems) > TASKS_SHOWN else []
    for number, (name, problem) in enumerate(problems.items()):
        text = f"{problem} {DIFFERS}" if number < TASKS_SHOWN else f"The task {_shown(name)} may differ at each call."
        warnings.append((first["tasks"][name], text))
    warnings += [(first, f"{problem} {DIFFERS}") for problem in others[:TASKS_SHOWN]]
    room = MAX_BYTES - len(json.dumps({"status": "ok", "value": first}))
    for place, text in warnings:
        room -= len(json.dumps({"warnings": [text]}))
        if room < 0:
            break
        place.setdefault("warnings", []).append(text)


def _different(before: list[Any] | None, after: list[Any] | None) -> str:
    """Returns in words what differs; "" if nothing does, or if the two cannot be compared."""
    if before is None or after is None:
        return ""
    (whole, fields), (whole_after, fields_after) = before, after
    if fields is None or fields_after is None:
        return "" if whole == whole_after else "the task or what is called with it"
    pairs = {field: (fields.get(field), fields_after.get(field)) for field in {**fields, **fields_after}}
    # "" is the fingerprint of what cannot be compared.
    different = [field for field, pair in pairs.items() if pair[0] != pair[1] and "" not in pair]
    shown = different[:FIELDS_SHOWN]
    of_task = [field for field in shown if field[0] in "'\""]  # the others are functions, or the whole value
    parts = [f"the task's field{'s' if len(of_task) > 1 else ''} {', '.join(of_task)}"] if of_task else []
    parts += [field for field in shown if field not in of_task]
    return "; ".join([*parts, "and others"] if len(different) > FIELDS_SHOWN else parts)


def _shown(name: str) -> str:
    return repr(name[:NAME_CHARACTERS])


def _only_once(name: str) -> str:
    return f"The tasks were read twice, and the task {_shown(name)} was there only once."
