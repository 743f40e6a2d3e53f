"""Gives a program beside a machine a file system and a table of processes of its own, by bubblewrap.

It sees programs and libraries, and the files, directories and devices that are named for it: no home, no other machine,
no socket of another program's, no other process. Whatever a machine makes of it reaches no more. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from provisioner.base import child_environment

PROGRAM = "bwrap"
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc/alternatives", "/etc/ld.so.cache")
_NAMESPACES = ("--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try")
# What Python runs and imports.
PYTHON = tuple(Path(path) for path in (sys.base_prefix, sys.prefix, Path(__file__).parents[3]))
# A table of its own processes.
PROCESSES = ("--proc", "/proc")
# System calls that no program beside a machine has a use for, and intruders have (asm/unistd_64.h): ptrace, those of
# keyrings, perf_event_open, process_vm_readv and _writev, bpf, userfaultfd, and io_uring's.
_DENIED = (101, 248, 249, 250, 298, 310, 311, 321, 323, 425, 426, 427)
# linux/seccomp.h, linux/filter.h, linux/audit.h; of struct seccomp_data: number and architecture.
_LOAD, _IS, _IS_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _REFUSE, _END = 0x7FFF0000, 0x00050001, 0x80000000  # refused with EPERM
_NUMBER, _ARCHITECTURE, _X86_64, _X32 = 0, 4, 0xC000003E, 0x40000000
BECOMES_ANOTHER_USER = ("CAP_SETUID", "CAP_SETGID")


def command(
    program: str, *, readable: Iterable[Path] = (), writable: Iterable[Path] = (), devices: Iterable[str] = (),
    capabilities: Iterable[str] = (), options: Iterable[str] = PROCESSES,
) -> list[str]:  # fmt: skip
    """Returns the prefix of a command that encloses a program. It keeps its working directory.

    Args:
        program: its name. If it is not below /usr, it is seen, but nothing beside it.
        readable, writable: files and directories of this host that the program sees, in their places.
        devices: of this host, such as "kvm".
        capabilities: what root keeps.
        options: more of bubblewrap's. By default, a table of the program's own processes.
    """
    argv = [PROGRAM, *_NAMESPACES]
    if os.geteuid() == 0:
        argv += ["--cap-drop", "ALL"]
        for capability in capabilities:
            argv += ["--cap-add", capability]
    named = [place for path in (Path(shutil.which(program) or program), *readable) for place in _places(path)]
    places = [
        *(("--ro-bind-try", Path(name)) for name in _SYSTEM),
        *(("--ro-bind", place) for place in named),
        *(("--dev-bind", Path("/dev", name)) for name in ("null", *devices)),
        *(("--bind", path.resolve()) for path in writable),
    ]
    for kind, place in dict.fromkeys(places):
        for above in reversed(place.parents):  # open to the user that root becomes
            argv += ["--perms", "0755", "--dir", str(above)]
        argv += [kind, str(place), str(place)]
    return [*argv, *options, "--remount-ro", "/", "--"]


@contextlib.contextmanager
def system_calls() -> Iterator[int]:
    """Yields a filter of system calls: a descriptor that bubblewrap inherits, as its option --seccomp says."""
    steps = [
        *((_LOAD, 0, 0, _ARCHITECTURE), (_IS, 1, 0, _X86_64), (_RETURN, 0, 0, _END)),
        *((_LOAD, 0, 0, _NUMBER), (_IS_AT_LEAST, len(_DENIED) + 1, 0, _X32)),
        *((_IS, len(_DENIED) - place, 0, number) for place, number in enumerate(_DENIED)),
        *((_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE)),
    ]
    with os.fdopen(os.memfd_create("system calls"), "r+b") as file:
        file.write(b"".join(struct.pack("=HBBI", *step) for step in steps))
        file.seek(0)
        yield file.fileno()


def _places(path: Path) -> list[Path]:
    """Returns where a file is, and by which name it is known; neither if it is seen there anyway."""
    places = (path.resolve(), path.absolute())
    return [place for place in places if not any(place.is_relative_to(system) for system in _SYSTEM)]


def start(
    prefix: Sequence[str], argv: Sequence[str], pass_fds: Iterable[int], **options: Any
) -> tuple[subprocess.Popen[bytes], int]:
    """Starts a program that outlives this one, and returns the process that waits for its end, and its own pid.

    Args:
        prefix: of `command`.
        argv: the program, with its arguments.
        pass_fds: descriptors that it inherits.
        options: of subprocess.Popen.

    Raises:
        OSError: bubblewrap is not installed, or makes no namespaces. What it cannot enclose later ends at once.
        subprocess.SubprocessError: what is to happen in its process before did not work.
    """
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as told, system_calls() as filtered:
        try:
            name, *arguments = prefix
            process = subprocess.Popen(
                [name, "--as-pid-1", "--info-fd", str(writing), "--seccomp", str(filtered), *arguments, *argv],
                pass_fds=(writing, filtered, *pass_fds),
                stdin=subprocess.DEVNULL, start_new_session=True,
                env=child_environment.for_python(os.environ), **options,
            )  # fmt: skip
        finally:
            os.close(writing)
        said = told.read()
    if not said:
        process.wait()
        raise OSError("bubblewrap cannot enclose it")
    return process, int(json.loads(said)["child-pid"])


def problem() -> str:
    """Returns why nothing can be enclosed here; empty if it can."""
    try:
        done = subprocess.run(
            [*command("true"), "true"], stdin=subprocess.DEVNULL, capture_output=True, check=False,
            env=child_environment.for_program(os.environ),
        )  # fmt: skip
    except OSError as error:
        return str(error)
    return done.stderr.decode(errors="replace").strip() if done.returncode else ""
