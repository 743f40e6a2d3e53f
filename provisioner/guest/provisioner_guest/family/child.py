"""Runs an operation in its own process, the only one that runs task code: as root in the family's directory.

Has the operations that run programs itself: the commands of a build step, and the family's own tests.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from provisioner_guest.family import files, operations, results
from provisioner_guest.family.request import BadRequestError, Request, python_command
from provisioner_guest.family.results import OperationError
from provisioner_guest.login import USER_PATH

NO_TESTS_COLLECTED = 5  # pytest's exit code


def shell(request: Request) -> None:
    """Runs commands as one script.

    Options:
        commands: the script's lines.
        shell: the shell and its options.
        cwd: absolute directory.
        user: the user that runs them; None for root.

    Raises:
        OperationError: the exit code of the script is not 0.
    """
    commands = _strings(request, "commands")
    program = _strings(request, "shell")
    # In memory, because a script may contain secrets: every user can see arguments. The other user must read it.
    script = os.memfd_create("script")
    with os.fdopen(script, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write("".join(f"{command}\n" for command in commands))
        file.flush()
        ended = subprocess.run(
            [*program, f"/proc/self/fd/{script}"],
            stdin=subprocess.DEVNULL,
            cwd=request.option("cwd", str),
            pass_fds=[script],
            check=False,
            **_as_user(request),
        )
    if ended.returncode != 0:
        message = f"the commands ended with exit code {ended.returncode}"
        raise OperationError("exit", message, exit_code=ended.returncode)


def _strings(request: Request, name: str) -> list[str]:
    values = request.option(name, list)
    if not values or not all(isinstance(value, str) and "\0" not in value for value in values):
        raise BadRequestError(f"the operation {request.operation!r} needs {name!r}, a list of strings")
    return values


def _as_user(request: Request) -> dict[str, Any]:
    """Returns subprocess.run's arguments for the user that the request names."""
    if request.options.get("user") is None:
        return {}
    user = request.user(request.option("user", str))
    environment = request.login_of(user, USER_PATH)
    if user.uid == os.geteuid():
        return {"env": environment}
    for output in (1, 2):
        os.fchown(output, user.uid, user.gid)  # otherwise its `echo ... > /dev/stderr` is refused
    groups = request.groups_of(user)

    def become() -> None:  # subprocess knows users from Python 3.9 on
        try:
            os.setgroups(groups)
            os.setgid(user.gid)
            os.setuid(user.uid)
        except OSError as error:
            os.write(2, f"cannot become {user.name}: {error}\n".encode())
            raise

    return {"env": environment, "preexec_fn": become}


def pytest(request: Request) -> dict[str, int]:
    """Runs the family's own tests: the files test_*.py and *_test.py next to its module.

    Options:
        arguments: additional arguments for pytest.

    Returns:
        exit_code, that of pytest.

    Raises:
        OperationError: pytest is not installed.
    """
    if importlib.util.find_spec("pytest") is None:
        message = "pytest is not installed in this machine: install it in the family image (pip install pytest)"
        raise OperationError("invalid", message)
    tests = sorted({path.name for pattern in ("test_*.py", "*_test.py") for path in request.home.glob(pattern)})
    if not tests:
        print("The task family has no tests: no file test_*.py or *_test.py.")
        return {"exit_code": NO_TESTS_COLLECTED}
    # -m puts the working directory, and with it the family, on the path. The plugin has the name of its entry point,
    # like METR's own: under another name, a test file that names it too would register it twice.
    command = [*python_command(), "-m", "pytest", "-p", "metr-task-standard"]
    options = [f"--task-standard-task-family-name={request.family}", f"--task-standard-task-name={request.task or ''}"]
    arguments = [*command, *options, *map(str, request.option("arguments", list)), "--", *tests]
    return {"exit_code": subprocess.run(arguments, stdin=subprocess.DEVNULL, cwd=request.home, check=False).returncode}


# The function of each operation. It takes the request and returns the result's value.
OPERATIONS: dict[str, Callable[[Request], Any]] = {
    "install": operations.install,
    "setup": operations.setup,
    "read_setup": operations.read_setup,
    "start": operations.start,
    "score": operations.score,
    "intermediate_score": operations.intermediate_score,
    "aggregate_scores": operations.aggregate_scores,
    "teardown": operations.teardown,
    "shell": shell,
    "pytest": pytest,
    "settle_home": files.settle_home,
    "read_submission": files.read_submission,
}


def main(request: Request, *, program_directory: str) -> None:
    """Runs one operation and writes its result.

    Args:
        request: the request.
        program_directory: the directory of this program. It is not on task code's path, so that a family's modules may
            have the names of our programs.
    """
    pid = os.getpid()
    # stdin contained the request; task code gets an empty one.
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    others = [path for path in sys.path if not path or os.path.realpath(path) != os.path.realpath(program_directory)]
    sys.path[:] = [str(request.home), *others]
    result = results.result_of(lambda: _operation(request))
    if os.getpid() != pid:
        os._exit(0)  # task code forked, and its child came back here: it has no result
    results.write(request.result, result)


def _operation(request: Request) -> Any:
    operation = OPERATIONS.get(request.operation)
    if operation is None:
        raise OperationError("invalid", f"there is no operation {request.operation!r}")
    return operation(request)
