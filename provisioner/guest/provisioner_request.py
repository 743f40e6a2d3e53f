"""The request that the controller sends, checked, and the places of one machine. Touches no file of the task."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


class BadRequestError(Exception):
    """The request is not one. Its message never quotes a value: a value may be a secret."""


@dataclass(frozen=True)
class Places:
    """Where things lie in the machine. `root` is / but in tests of this program."""

    root: Path = Path("/")

    @property
    def family(self) -> Path:
        """The family's files and root's home."""
        return self.root / "root"

    @property
    def agent_home(self) -> Path:
        """Home of the user `agent`."""
        return self.root / "home/agent"

    @property
    def state(self) -> Path:
        """This program's own directory, root's only."""
        return self.root / "var/lib/provisioner"

    @property
    def etc(self) -> Path:
        """Users, groups and the environment of every login."""
        return self.root / "etc"


@dataclass(frozen=True)
class Request:
    """One operation to do.

    Args:
        operation: its name, a key of provisioner_child.OPERATIONS.
        family: name of the family's module, or "" where the operation needs none.
        task: name of the task, or None.
        environment: variables that the task's code gets beside the machine's own.
        result: absolute path of the file that the result goes to.
        output_limit_bytes: how much of stdout, and of stderr, is passed on.
        timeout_seconds: after this the process group is killed; None for no limit.
        places: where things lie.
        options: the operation's own keys.
    """

    operation: str
    family: str
    task: str | None
    environment: dict[str, str]
    result: Path
    output_limit_bytes: int
    timeout_seconds: float | None
    places: Places
    options: dict[str, Any]

    def option(self, name: str, kind: type[T]) -> T:
        """Give a key of the operation's own.

        Raises:
            BadRequestError: it is missing or of another type.
        """
        value = self.options.get(name)
        if not isinstance(value, kind):
            raise BadRequestError(f"the operation {self.operation!r} needs {name!r}, a {kind.__name__}")
        return value


# Key of the request -> the types that it may have.
COMMON_KEYS: dict[str, tuple[type, ...]] = {
    "operation": (str,),
    "family": (str,),
    "task": (str, type(None)),
    "environment": (dict,),
    "result": (str,),
    "output_limit_bytes": (int,),
    "timeout_seconds": (int, float, type(None)),
    "root": (str,),
}
DEFAULTS: dict[str, Any] = {"family": "", "task": None, "environment": {}, "timeout_seconds": None, "root": "/"}


def parse_request(data: bytes) -> Request:
    """Parse and check a request.

    Args:
        data: one JSON object.

    Raises:
        BadRequestError: it is not JSON, or a common key is missing or of the wrong type.
    """
    try:
        given = json.loads(data)
    except ValueError:
        raise BadRequestError("the request is not JSON") from None
    if not isinstance(given, dict):
        raise BadRequestError("the request is not a JSON object")
    keys = {**DEFAULTS, **given}
    for name, types in COMMON_KEYS.items():
        if not isinstance(keys.get(name), types) or (isinstance(keys[name], bool)):
            raise BadRequestError(f"the request's {name!r} is missing or of the wrong type")
    if not keys["result"].startswith("/"):
        raise BadRequestError("the request's 'result' is not an absolute path")
    return Request(
        operation=keys["operation"],
        family=keys["family"],
        task=keys["task"],
        environment=_variables(keys["environment"]),
        result=Path(keys["result"]),
        output_limit_bytes=max(keys["output_limit_bytes"], 0),
        timeout_seconds=keys["timeout_seconds"],
        places=Places(Path(keys["root"])),
        options={name: value for name, value in given.items() if name not in COMMON_KEYS},
    )


def _variables(given: dict[str, Any]) -> dict[str, str]:
    for name, value in given.items():
        if not isinstance(value, str) or "\0" in name + value or "=" in name or not name:
            raise BadRequestError("the request's 'environment' holds a name or value that no environment can hold")
    return given


def python_command() -> list[str]:
    """The interpreter that runs us, to be started again in the same way."""
    return [sys.executable, *(["-B"] if sys.flags.dont_write_bytecode else [])]
