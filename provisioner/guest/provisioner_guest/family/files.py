"""Implements the operations on files that the agent can reach. Follows no link that the agent may have planted.

Works from open directories and names of one component, so that the agent cannot swap a directory on the path.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Callable

from provisioner_guest.family.request import Request, User

# Deeper than any real tree, but below the limits on recursion and open files.
MAX_DEPTH = 400
MAX_WARNINGS = 20
KEY_HEADER_BYTES = 4096
DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: a FIFO without a writer must not block.
FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# The file is missing or of another kind: a process of the task may have replaced it between two calls.
GONE = (errno.ENOENT, errno.ELOOP, errno.ENOTDIR)

Visit = Callable[[int, str, os.stat_result], bool]


def settle_home(request: Request) -> dict[str, Any]:
    """Gives /home/agent to agent after start() and places the instructions.

    Files and directory trees of the group `protected` are left alone, and so are top-level directories whose name
    begins with a dot, except .ssh. Private keys of agent's under .ssh get mode 0600, which OpenSSH requires.

    Options:
        instructions: the text of instructions.txt, to which a newline is added.
        skip_chown: whether to leave all owners unchanged.

    Returns:
        warnings: the files that could not be given to agent.
    """
    instructions = request.option("instructions", str)
    user = request.user("agent")
    warnings: list[str] = []
    with _open(os.fspath(request.root / "home/agent"), DIRECTORY_FLAGS) as home:
        if not request.option("skip_chown", bool):
            _give_home(home, user, request.group("protected"), warnings)
        _tighten_private_keys(home, user.uid)
        _place(home, "instructions.txt", f"{instructions}\n", owner=(user.uid, user.gid), mode=0o644)
    return {"warnings": warnings[:MAX_WARNINGS]}


def _give_home(home: int, user: User, protected: int, warnings: list[str]) -> None:
    def give(directory: int, name: str, status: os.stat_result) -> bool:
        is_directory = stat.S_ISDIR(status.st_mode)
        hidden_at_top = directory == home and name.startswith(".") and name != ".ssh"
        if status.st_gid == protected or (is_directory and hidden_at_top):
            return False
        try:
            os.chown(name, user.uid, user.gid, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            return False  # a process of the task has removed it
        except OSError as error:
            warnings.append(f"could not give {name!r} to agent: {error.strerror}")
        return is_directory

    os.fchown(home, user.uid, user.gid)
    _walk(home, give)


def _tighten_private_keys(home: int, agent_uid: int) -> None:
    def tighten(directory: int, name: str, status: os.stat_result) -> bool:
        if stat.S_ISREG(status.st_mode):
            with _open(name, FILE_FLAGS, directory) as file:
                status = os.fstat(file)
                # Keys of other owners are unchanged: 0600 would lock agent out.
                if stat.S_ISREG(status.st_mode) and status.st_uid == agent_uid and _is_private_key(file):
                    os.fchmod(file, 0o600)
        return stat.S_ISDIR(status.st_mode)

    try:
        with _open(".ssh", DIRECTORY_FLAGS, home) as ssh:
            _walk(ssh, tighten)
    except OSError as error:
        if error.errno not in GONE:
            raise


def _is_private_key(file: int) -> bool:
    return re.search(rb"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----", os.pread(file, KEY_HEADER_BYTES, 0)) is not None


def _walk(directory: int, visit: Visit, depth: int = 0) -> None:
    """Visits all below an open directory; `visit` returns whether to descend. Links are visited, not followed."""
    if depth > MAX_DEPTH:
        raise OSError(errno.ENAMETOOLONG, f"directories nested deeper than {MAX_DEPTH} levels")
    for name in os.listdir(directory):
        try:
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
            if visit(directory, name, status):
                with _open(name, DIRECTORY_FLAGS, directory) as below:
                    _walk(below, visit, depth + 1)
        except OSError as error:
            if error.errno not in GONE:
                raise


@contextmanager
def _open(path: str, flags: int, directory: int | None = None) -> Iterator[int]:
    descriptor = os.open(path, flags, dir_fd=directory)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _place(directory: int, name: str, text: str, *, owner: tuple[int, int], mode: int) -> None:
    """Atomically replaces whatever has a name in an open directory by a new file, whose owner is a user and a group."""
    unfinished = f".{name}.{os.urandom(8).hex()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.open(unfinished, flags, 0o600, dir_fd=directory)
    try:
        with os.fdopen(file, "wb") as stream:
            stream.write(text.encode("utf-8", errors="replace"))
            os.fchown(stream.fileno(), *owner)
            os.fchmod(stream.fileno(), mode)
        os.rename(unfinished, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        os.unlink(unfinished, dir_fd=directory)
        raise


def read_submission(request: Request) -> dict[str, Any]:
    """Reads the agent's submission file, safely whatever kind of file it is.

    Options:
        path: the submission's path.
        limit_bytes: the largest size that is read.

    Returns:
        found, text and, if the file there cannot be a submission, the reason.
    """
    path, limit = request.option("path", str), request.option("limit_bytes", int)
    try:
        with _open(path, FILE_FLAGS) as file:
            reason, data = _unfit(os.fstat(file), limit), b""
            while not reason and len(data) <= limit and (more := os.read(file, limit + 1 - len(data))):
                data += more
    except OSError as error:
        # A missing file is not an error: an agent may submit nothing.
        reasons = {errno.ENOENT: "", errno.ELOOP: "it is a symbolic link"}
        return _submission(None, reasons.get(error.errno or 0, error.strerror or "it cannot be opened"))
    if len(data) > limit:
        reason = f"it is larger than {limit} bytes"
    return _submission(None if reason else data, reason)


def _unfit(status: os.stat_result, limit: int) -> str:
    if not stat.S_ISREG(status.st_mode):
        return "it is not a regular file"
    if status.st_nlink != 1:
        return "it is a file with several names (hard links)"
    return f"it is larger than {limit} bytes" if status.st_size > limit else ""


def _submission(data: bytes | None, reason: str) -> dict[str, Any]:
    text = "" if data is None else data.decode("utf-8", errors="replace")
    return {"found": data is not None, "text": text, "reason": reason}
