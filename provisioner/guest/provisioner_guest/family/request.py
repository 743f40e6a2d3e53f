"""Parses and checks the controller's request, and defines the paths in a machine. Touches none of the task's files."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


class BadRequestError(Exception):
    """The request is not valid. The message never quotes a value, which may be a secret."""


@dataclass(frozen=True)
class Places:
    """The paths in a machine. `root` is / except in this program's tests."""

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
        """This program's own directory, which only root can enter."""
        return self.root / "var/lib/provisioner"

    @property
    def etc(self) -> Path:
        """The directory with users, groups and the environment of every login."""
        return self.root / "etc"


@dataclass(frozen=True)
class Request:
    """The request to run one operation.

    Args:
        operation: its name, a key of child.OPERATIONS.
        family: the name of the family's module, or "" if the operation needs none.
        task: the name of the task, or None.
        environment: variables for the task's code, in addition to the machine's own.
        result: the absolute path of the result file.
        output_limit_bytes: how many bytes of stdout, and of stderr, are passed on.
        timeout_seconds: when the process group is killed; None for never.
        places: the paths in the machine.
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
        """Return the value of one of the operation's own keys.

        Raises:
            BadRequestError: the key is missing or its value has another type.
        """
        value = self.options.get(name)
        if not isinstance(value, kind):
            raise BadRequestError(f"the operation {self.operation!r} needs {name!r}, a {kind.__name__}")
        return value


# The types that each key of the request may have.
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
        BadRequestError: the data is not JSON, or a common key is missing or has the wrong type.
    """
    try:
        request = json.loads(data)
    except ValueError:
        raise BadRequestError("the request is not JSON") from None
    if not isinstance(request, dict):
        raise BadRequestError("the request is not a JSON object")
    keys = {**DEFAULTS, **request}
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
        options={name: value for name, value in request.items() if name not in COMMON_KEYS},
    )


def _variables(variables: dict[str, Any]) -> dict[str, str]:
    for name, value in variables.items():
        if not isinstance(value, str) or "\0" in name + value or "=" in name or not name:
            raise BadRequestError("the request's 'environment' holds a name or value that no environment can hold")
    return variables


def as_json(request: Request) -> bytes:
    """Return the request as the JSON that `parse_request` reads."""
    keys = asdict(request)
    options = keys.pop("options")
    keys["root"] = str(keys.pop("places")["root"])
    return json.dumps({**options, **keys, "result": str(request.result)}).encode("ascii")


def python_command() -> list[str]:
    """Return the command line that starts this interpreter again with the same options."""
    return [sys.executable, *_options()]


def family_python(path: str) -> list[str]:
    """Return the command line that starts the family's Python, with this one's option not to write compiled files.

    Args:
        path: the PATH of the family's code.

    Raises:
        LookupError: there is none.
    """
    program = shutil.which("python3", path=path)
    if program is None:
        raise LookupError("this machine has no `python3` to run the family's code: something has removed it")
    return [program, *_options()]


def _options() -> list[str]:
    return ["-B"] if sys.flags.dont_write_bytecode else []
