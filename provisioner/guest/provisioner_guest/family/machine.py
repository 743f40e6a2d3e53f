"""Reads the machine's users, groups and the environment variables of each login. Never writes."""

from __future__ import annotations

from dataclasses import dataclass

from provisioner_guest.family.request import Places
from provisioner_guest.login import ROOT_PATH, USER_PATH, login_environment


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
    """Return the environment of an operation without the request's variables."""
    return login_environment(str(places.etc), "root", str(places.family), "/bin/bash", ROOT_PATH)


def user_environment(places: Places, user: User) -> dict[str, str]:
    """Return the environment of an operation that another user runs."""
    return login_environment(str(places.etc), user.name, user.home, user.shell, USER_PATH)
