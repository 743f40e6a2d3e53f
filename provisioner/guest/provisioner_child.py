"""Runs an operation in its own process, the only one that runs task code: as root in the family's directory."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import provisioner_commands
import provisioner_family
import provisioner_files
import provisioner_result
from provisioner_request import Request

# The function of each operation. It takes the request and returns the result's value.
OPERATIONS: dict[str, Callable[[Request], Any]] = {
    "install": provisioner_family.install,
    "setup": provisioner_family.setup,
    "read_setup": provisioner_family.read_setup,
    "start": provisioner_family.start,
    "score": provisioner_family.score,
    "intermediate_score": provisioner_family.intermediate_score,
    "aggregate_scores": provisioner_family.aggregate_scores,
    "teardown": provisioner_family.teardown,
    "shell": provisioner_commands.shell,
    "pytest": provisioner_commands.pytest,
    "settle_home": provisioner_files.settle_home,
    "read_submission": provisioner_files.read_submission,
}


def main(request: Request, *, program_directory: str) -> None:
    """Run one operation and write its result.

    Args:
        request: the request.
        program_directory: the directory of this program, from which task code cannot import.
    """
    pid = os.getpid()
    # stdin contained the request; task code gets an empty one.
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    others = [path for path in sys.path if not path or os.path.realpath(path) != os.path.realpath(program_directory)]
    sys.path[:] = [str(request.places.family), *others]
    result = provisioner_result.result_of(lambda: _operation(request))
    if os.getpid() != pid:
        os._exit(0)  # task code forked, and its child came back here: it has no result
    provisioner_result.write(request.result, result)


def _operation(request: Request) -> Any:
    operation = OPERATIONS.get(request.operation)
    if operation is None:
        raise provisioner_result.OperationError("invalid", f"there is no operation {request.operation!r}")
    return operation(request)
