"""Reads the machine's users, groups and the environment variables of each login. Never writes."""

from __future__ import annotations

from dataclasses import dataclass

from provisioner_request import Places

# The PATH that Debian's login sets for root and for other users (/etc/login.defs, ENV_SUPATH and ENV_PATH).
ROOT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
USER_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/games:/usr/games"


@dataclass(frozen=True)
class User:
    """A line of /etc/passwd."""

    name: str
    uid: int
    gid: int
    home: str
    shell: str


def find_user(places: Places, name: str) -> User:
    """Look up a user.

    Raises:
        LookupError: there is no such user.
    """
    for fields in _lines(places, "passwd", 7):
        if fields[0] == name:
            return User(name, int(fields[2]), int(fields[3]), fields[5], fields[6] or "/bin/sh")
    raise LookupError(f"there is no user {name!r} in this machine")


def find_group(places: Places, name: str) -> int:
    """Look up a group's id.

    Raises:
        LookupError: there is no such group.
    """
    for fields in _lines(places, "group", 4):
        if fields[0] == name:
            return int(fields[2])
    raise LookupError(f"there is no group {name!r} in this machine")


def groups_of(places: Places, user: User) -> list[int]:
    """Return the ids of all groups that the user is in."""
    others = [int(fields[2]) for fields in _lines(places, "group", 4) if user.name in fields[3].split(",")]
    return [user.gid, *others]


def _lines(places: Places, file: str, fields: int) -> list[list[str]]:
    text = (places.etc / file).read_text(encoding="utf-8", errors="surrogateescape")
    return [line.split(":") for line in text.splitlines() if line.count(":") == fields - 1]


def root_environment(places: Places) -> dict[str, str]:
    """Return the environment of an operation without the request's variables. Nothing of this process leaks in."""
    return {
        "PATH": ROOT_PATH,
        "HOME": str(places.family),
        "USER": "root",
        "LOGNAME": "root",
        "SHELL": "/bin/bash",
        "LANG": "C.UTF-8",
        **_etc_environment(places),
    }


def user_environment(places: Places, user: User) -> dict[str, str]:
    """Return the environment of an operation that another user runs."""
    own = {"HOME": user.home, "USER": user.name, "LOGNAME": user.name, "SHELL": user.shell, "PATH": USER_PATH}
    return {**root_environment(places), **own, **_etc_environment(places)}


def _etc_environment(places: Places) -> dict[str, str]:
    """Parse /etc/environment by the rules of pam_env: NAME=value, optionally quoted, optionally after `export`."""
    try:
        text = (places.etc / "environment").read_text(encoding="utf-8", errors="surrogateescape")
    except FileNotFoundError:
        return {}
    variables = {}
    for line in text.splitlines():
        name, equals, value = line.strip().removeprefix("export ").partition("=")
        if equals and name and not name.startswith("#"):
            value = value.strip()
            quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
            variables[name.strip()] = value[1:-1] if quoted else value
    return variables
