"""Gives a process what a login has: environment variables, ids, signals. Imports little, as agents wait for it."""

from __future__ import annotations

import os
import pwd
import signal

# The PATH that Debian's login sets for root and for other users (/etc/login.defs, ENV_SUPATH and ENV_PATH).
ROOT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
USER_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/games:/usr/games"


def login_environment(etc: str, name: str, home: str, shell: str, path: str) -> dict[str, str]:
    """Returns the environment of a user's login. Nothing of this process leaks in.

    Args:
        etc: the directory with the file `environment`.
        name: the user's name.
        home: the user's home.
        shell: the user's shell.
        path: PATH, unless the file sets it.
    """
    own = {"PATH": path, "HOME": home, "USER": name, "LOGNAME": name, "SHELL": shell, "LANG": "C.UTF-8"}
    return {**own, **etc_environment(etc)}


def etc_environment(etc: str) -> dict[str, str]:
    """Parses /etc/environment by the rules of pam_env: NAME=value, optionally quoted, optionally after `export`."""
    try:
        with open(os.path.join(etc, "environment"), encoding="utf-8", errors="surrogateescape") as file:
            text = file.read()
    except FileNotFoundError:
        return {}
    variables = {}
    for line in text.splitlines():
        line = line.strip()
        name, equals, value = line[len("export ") if line.startswith("export ") else 0 :].partition("=")
        if equals and name and not name.startswith("#"):
            value = value.strip()
            quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
            variables[name.strip()] = value[1:-1] if quoted else value
    return variables


def protect(adjustment: str) -> None:
    """Sets the priority with which the kernel ends this process when memory is short (oom_score_adj)."""
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write(adjustment)
    except OSError:  # only root may
        pass


def become(user: pwd.struct_passwd) -> None:
    """Gives this process, and its output, to a user."""
    if user.pw_uid == os.geteuid():
        return
    for output in (1, 2):
        os.fchown(output, user.pw_uid, user.pw_gid)  # otherwise its `echo ... > /dev/stderr` is refused
    os.initgroups(user.pw_name, user.pw_gid)
    os.setgid(user.pw_gid)
    os.setuid(user.pw_uid)


def restore_signals() -> None:
    """Handles signals again that Python ignores, as programs inherit that."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
