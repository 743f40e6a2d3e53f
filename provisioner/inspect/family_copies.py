"""Keeps the families that make a configuration's machines: one copy of its files for all samples of a process.

The copies lie in a temporary directory that the process removes when it ends. If the process is killed, a later
process removes the directory.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from provisioner.family.loader import TaskFamily
from provisioner.inspect.configuration import Machine
from provisioner.inspect.fields import Pairs
from provisioner.inspect.packing import LOG_SUFFIX, pack
from provisioner.inspect.plain_family import plain_family

PREFIX = "provisioner-inspect-"
# A directory is locked a moment after it was made.
YOUNG_SECONDS = 3600.0

# What the copies of files are made from, as far as a look at the files tells.
_Look = tuple[tuple[str, int, int, int], ...]

_families: dict[tuple[Machine, str, str, Pairs, _Look], TaskFamily] = {}
_lock = threading.Lock()


def family_of_machine(machine: Machine, internet: str, base_image: str = "", packed: Pairs = ()) -> TaskFamily:
    """Returns the family that makes a machine. It is written once, and again if files that it copies have changed.

    Args:
        base_image: as for plain_family.
        packed: from the paths of archives in the machine to what is in them here. Unlike files of a family, they have
            each file and link of a directory, empty directories and all modes.

    Raises:
        UsageError: a file that the configuration names does not exist or cannot be copied.
    """
    with _lock:
        # What packing leaves out changes while the eval runs.
        of_packed = tuple(line for line in _look(packed) if not line[0].endswith(LOG_SUFFIX))
        key = (machine, internet, base_image, packed, (*_look(machine.files), *of_packed))
        if key not in _families:
            directory = Path(tempfile.mkdtemp(dir=_directory()))
            try:
                with tempfile.TemporaryDirectory(dir=directory) as archives:
                    files = [(target, pack(Path(source), target, Path(archives))) for target, source in packed]
                    whole = machine.model_copy(update={"files": (*files, *machine.files)})
                    _families[key] = plain_family(whole, internet, directory, base_image)
            except BaseException:
                shutil.rmtree(directory, ignore_errors=True)
                raise
        return _families[key]


def _look(files: Pairs) -> _Look:
    return tuple(sorted(line for _, source in files for line in _lines_of(Path(source))))


def _lines_of(source: Path) -> Iterator[tuple[str, int, int, int]]:
    yield from _line(source, follows=True)  # of a link that is named, what it leads to is copied; of others, the link
    for directory, _, names in os.walk(source):
        for name in (".", *names):
            yield from _line(Path(directory, name), follows=False)


def _line(path: Path, *, follows: bool) -> Iterator[tuple[str, int, int, int]]:
    with contextlib.suppress(OSError):  # the copy reports it
        status = path.stat(follow_symlinks=follows)
        yield str(path), status.st_mtime_ns, status.st_size, status.st_mode


@cache
def _directory() -> Path:
    remove_abandoned()
    directory = tempfile.mkdtemp(prefix=PREFIX)
    _locked(directory)  # until this process ends, however it does
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return Path(directory)


def _locked(directory: str | Path) -> int | None:
    """Locks a directory and returns the descriptor that holds the lock; None if another process has it."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def remove_abandoned() -> None:
    """Removes the directories of this user's processes that were killed."""
    for directory in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            status = directory.lstat()
            if status.st_uid != os.geteuid() or abs(time.time() - status.st_mtime) < YOUNG_SECONDS:
                continue
            if (descriptor := _locked(directory)) is not None:
                shutil.rmtree(directory, ignore_errors=True)
                os.close(descriptor)
