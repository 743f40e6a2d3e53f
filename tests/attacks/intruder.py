"""What has taken over a program beside a machine, and looks for more. It runs in the program's place, from its text."""

from __future__ import annotations

import ctypes
import json
import os
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

# asm/unistd_64.h, linux/keyctl.h, linux/ptrace.h, linux/sched.h, linux/mount.h
SYS_IO_URING_SETUP, SYS_KEYCTL, KEYCTL_SEARCH, SESSION_KEYRING = 425, 250, 10, -3
PTRACE_SEIZE, CLONE_NEWUSER, CLONE_NEWNS, MS_REMOUNT = 0x4206, 0x10000000, 0x20000, 0x20
LIBC = ctypes.CDLL(None, use_errno=True)
PROGRAMS = ("/usr", "/lib", "/lib64", "/bin", "/sbin", "/proc", "/dev", "/etc/alternatives", "/etc/ld.so.cache")


def works(action: Callable[[], object]) -> bool:
    """Returns whether an action succeeds."""
    try:
        action()
    except OSError:
        return False
    return True


def call(function: str, *arguments: int | bytes) -> None:
    """Calls a function of the C library; raises OSError if it fails."""
    words = (ctypes.c_long(each) if isinstance(each, int) else each for each in arguments)
    if getattr(LIBC, function)(*words) < 0:
        raise OSError(ctypes.get_errno(), function)


def connect(address: str) -> None:
    """Connects to a Unix socket."""
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(address)


def make_file(directory: str) -> None:
    """Makes a file and removes it."""
    path = Path(directory, "made")
    path.touch()
    path.unlink()


def seen(own: Iterable[str]) -> list[str]:
    """Returns the files that it sees, but for programs and what the program itself needs."""
    known, found = {*PROGRAMS, *own}, []
    for directory, names, files in os.walk("/"):
        names[:] = [name for name in names if os.path.join(directory, name) not in known]  # noqa: PTH118
        found += [path for name in files if (path := os.path.join(directory, name)) not in known]  # noqa: PTH118
    return sorted(found)


def look(asked: dict[str, Any]) -> dict[str, object]:
    """Looks for files and sockets, and for places to write."""
    places = {"/", "/dev", "/etc", "/tmp", "/usr", "/var/tmp", os.getcwd(), *asked["own"]}  # noqa: PTH109
    return {
        "files": [path for path in asked["files"] if works(Path(path).read_bytes)],
        "sockets": [path for path in asked["sockets"] if works(lambda path=path: connect(path))],  # type: ignore[misc]
        "seen": seen(asked["own"]),
        "writable": [place for place in sorted(places) if works(lambda place=place: make_file(place))],  # type: ignore[misc]
    }


def main(text: str) -> None:
    """Becomes the user that the program becomes, tries everything, and prints what it reached.

    Args:
        text: as JSON: the files, sockets, process, port and key that it looks for, and the program's own files.
    """
    asked: dict[str, Any] = json.loads(text)
    if user := asked["user"]:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    pid, key = asked["pid"], asked["key"].encode()
    own = {"1", str(os.getpid())}
    reached = look(asked) | {
        "abstract": works(lambda: connect(f"\0{asked['abstract']}")),
        "signal": works(lambda: os.kill(pid, 0)),
        "ptrace": works(lambda: call("ptrace", PTRACE_SEIZE, pid, 0, 0)),
        "memory": works(lambda: os.open(f"/proc/{pid}/mem", os.O_RDONLY)),
        "processes": [path.name for path in Path("/proc").glob("[0-9]*") if path.name not in own],
        "loopback": works(lambda: socket.create_connection(("127.0.0.1", asked["port"]), 2).close()),
        "cards": sorted(name for _, name in socket.if_nameindex()),
        "key": works(lambda: call("syscall", SYS_KEYCTL, KEYCTL_SEARCH, SESSION_KEYRING, b"user", key, 0)),
        "io_uring": works(lambda: call("syscall", SYS_IO_URING_SETUP, 1, bytes(120))),
        "kernel": works(lambda: os.open("/proc/sys/kernel/core_pattern", os.O_WRONLY)),
        "devices": sorted(path.name for path in Path("/dev").glob("*")),
        "setuid": not os.statvfs("/usr").f_flag & os.ST_NOSUID,
    }
    # In a user namespace of its own it may mount.
    if works(lambda: call("unshare", CLONE_NEWUSER | CLONE_NEWNS)):
        reached["remounts"] = works(lambda: call("mount", b"none", b"/", b"", MS_REMOUNT, 0))
        reached["mounts"] = works(lambda: call("mount", b"proc", b"/proc", b"proc", 0, 0))
        reached |= {f"{name}, once more": value for name, value in look(asked).items()}
    print(json.dumps(reached), flush=True)
