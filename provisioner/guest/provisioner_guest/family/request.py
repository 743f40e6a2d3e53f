"""Parses and checks the controller's request, and reads the machine's users. Touches none of the task's files."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from provisioner_guest.login import login_environment

T = TypeVar("T")
OPTIONS = ["-B"] if sys.flags.dont_write_bytecode else []


class BadRequestError(Exception):
    """The request is not valid. The message never quotes a value, which may be a secret."""


@dataclass(frozen=True)
class User:
    """A line of /etc/passwd."""

    name: str
    uid: int
    gid: int
    home: str
    shell: str


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
        root: / except in this program's tests.
        options: the operation's own keys.
    """

    operation: str
    family: str
    task: str | None
    environment: dict[str, str]
    result: Path
    output_limit_bytes: int
    timeout_seconds: float | None
    root: Path
    options: dict[str, Any]

    def option(self, name: str, kind: type[T]) -> T:
        """Returns the value of one of the operation's own keys.

        Raises:
            BadRequestError: the key is missing or its value has another type.
        """
        value = self.options.get(name)
        if not isinstance(value, kind):
            raise BadRequestError(f"the operation {self.operation!r} needs {name!r}, a {kind.__name__}")
        return value

    @property
    def home(self) -> Path:
        """Root's home, with the family's files."""
        return self.root / "root"

    def user(self, name: str) -> User:
        """Looks up a user.

        Raises:
            LookupError: the machine has no such user.
        """
        for fields in self._lines("passwd", 7):
            if fields[0] == name:
                return User(name, int(fields[2]), int(fields[3]), fields[5], fields[6] or "/bin/sh")
        raise LookupError(f"there is no user {name!r} in this machine")

    def group(self, name: str) -> int:
        """Looks up a group's id.

        Raises:
            LookupError: the machine has no such group.
        """
        for fields in self._lines("group", 4):
            if fields[0] == name:
                return int(fields[2])
        raise LookupError(f"there is no group {name!r} in this machine")

    def groups_of(self, user: User) -> list[int]:
        """Returns the ids of all groups that the user is in."""
        return [user.gid, *(int(fields[2]) for fields in self._lines("group", 4) if user.name in fields[3].split(","))]

    def _lines(self, file: str, fields: int) -> list[list[str]]:
        text = (self.root / "etc" / file).read_text(encoding="utf-8", errors="surrogateescape")
        return [line.split(":") for line in text.splitlines() if line.count(":") == fields - 1]

    def login_of(self, user: User, path: str) -> dict[str, str]:
        """Returns the environment of a user's operation: a login's with this PATH, and the request's variables."""
        login = login_environment(str(self.root / "etc"), user.name, user.home, user.shell, path)
        return {**login, **self.environment}


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
    """Parses and checks a request.

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
        root=Path(keys["root"]),
        options={name: value for name, value in request.items() if name not in COMMON_KEYS},
    )


def _variables(variables: dict[str, Any]) -> dict[str, str]:
    for name, value in variables.items():
        if not isinstance(value, str) or "\0" in name + value or "=" in name or not name:
            raise BadRequestError("the request's 'environment' holds a name or value that no environment can hold")
    return variables


def as_json(request: Request) -> bytes:
    """Returns the request as the JSON that `parse_request` reads."""
    keys = asdict(request)
    options = keys.pop("options")
    return json.dumps({**options, **keys, "root": str(request.root), "result": str(request.result)}).encode("ascii")


def python_command() -> list[str]:
    """Returns the command line that starts this interpreter again with the same options."""
    return [sys.executable, *OPTIONS]


def family_python(path: str) -> list[str]:
    """Returns the command line that starts the family's Python, with this one's option not to write compiled files.

    Args:
        path: the PATH of the family's code.

    Raises:
        LookupError: there is none.
    """
    program = shutil.which("python3", path=path)
    if program is None:
        raise LookupError("this machine has no `python3` to run the family's code: something has removed it")
    return [program, *OPTIONS]
