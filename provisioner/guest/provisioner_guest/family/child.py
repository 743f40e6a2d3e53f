"""Runs an operation in its own process, the only one that runs task code: as root in the family's directory."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from provisioner_guest.family import commands, files, operations, results
from provisioner_guest.family.request import Request

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
    "shell": commands.shell,
    "pytest": commands.pytest,
    "settle_home": files.settle_home,
    "read_submission": files.read_submission,
}


def main(request: Request, *, program_directory: str) -> None:
    """Run one operation and write its result.

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
    sys.path[:] = [str(request.places.family), *others]
    result = results.result_of(lambda: _operation(request))
    if os.getpid() != pid:
        os._exit(0)  # task code forked, and its child came back here: it has no result
    results.write(request.result, result)


def _operation(request: Request) -> Any:
    operation = OPERATIONS.get(request.operation)
    if operation is None:
        raise results.OperationError("invalid", f"there is no operation {request.operation!r}")
    return operation(request)
