"""Writes a machine's configuration as a task family of one task, so that it is built, cached and isolated as one.

All samples of a process share one copy of the files, which are packed to the same bytes whenever they are the same.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import shlex
import shutil
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path, PurePosixPath

from provisioner.errors import TaskFamilyError, UsageError
from provisioner.family.build_steps import load_build_steps
from provisioner.family.files import list_files
from provisioner.family.loader import TaskFamily, load_family
from provisioner.images.provisioning import part
from provisioner.inspect.configuration import Machine
from provisioner.inspect.fields import Pairs

FAMILY = "sandbox"
TASK = "machine"
WORKDIR = "/workspace"
# The family's directory with what its build steps copy.
SOURCES = "sources"

# The Python of families, which hides Debian's.
_REMOVE_FAMILY_PYTHON = (
    "find /usr/local/bin /usr/local/include /usr/local/lib/python3* -mindepth 1 -maxdepth 1 ! -name dist-packages "
    "-exec rm -rf {} +"
)

_MODULE = '''"""A machine of an Inspect eval, without a task of its own."""


class TaskFamily:
    standard_version = "0.5.0"

    @staticmethod
    def get_tasks():
        return {{"{task}": {{}}}}

    @staticmethod
    def get_instructions(t):
        return ""

    @staticmethod
    def get_permissions(t):
        return {permissions!r}
'''
_UNIT = """[Unit]
Description={name}, of the eval's configuration
After=network.target
StartLimitIntervalSec=0

[Service]
ExecStart=/bin/sh -c {command}
Restart=always
RestartSec=1
# The kernel ends it before the machine does nothing else any more than wait for memory.
MemoryMax=90%

[Install]
WantedBy=multi-user.target
"""


def workdir(machine: Machine) -> str:
    """Returns the directory of a machine's relative paths."""
    return machine.workdir or WORKDIR


def plain_family(machine: Machine, internet: str, directory: Path, base_image: str = "") -> TaskFamily:
    """Writes a family that makes a configuration's machine, and loads it.

    Args:
        internet: as the configuration says.
        directory: a directory for it, in which no other is.
        base_image: the base image that it needs; empty for what the operator's settings say.

    Raises:
        UsageError: a file that the configuration names does not exist or cannot be copied.
    """
    family = directory / FAMILY
    (family / SOURCES).mkdir(parents=True)
    permissions = ["full_internet"] if internet == "full" else []
    (family / f"{FAMILY}.py").write_text(_MODULE.format(task=TASK, permissions=permissions))
    asked = {"cpus": machine.cpus, "memory_gb": machine.memory_gb, "storage_gb": machine.storage_gb}
    resources = {name: value for name, value in asked.items() if value is not None}
    needs = {"base_image": base_image} if base_image else {}
    (family / "manifest.yaml").write_text(json.dumps({**needs, "tasks": {TASK: {"resources": resources}}}))
    steps = [_packages(machine), *_files(machine, family), _users(machine), *map(_shell, machine.run)]
    steps += _services(machine, family)
    (family / "build_steps.json").write_text(json.dumps(steps))
    loaded = load_family(family)
    # What steps copy goes where they say, and nowhere else. Nothing here is what the text of `run` may name.
    return replace(loaded, files=(loaded.module.name,), build_steps=load_build_steps(family))


def _shell(*commands: str) -> dict[str, object]:
    return {"type": "shell", "commands": commands}


def _packages(machine: Machine) -> dict[str, object]:
    names = " ".join(machine.packages)
    if not names:
        return _shell(part("Debian's Python"), _REMOVE_FAMILY_PYTHON)
    install = f"DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends {names}"
    return _shell(part(f"packages {names}"), _REMOVE_FAMILY_PYTHON, "apt-get update", install)


def _users(machine: Machine) -> dict[str, object]:
    user = machine.user
    return _shell(
        part(f"user {user}, {workdir(machine)}"),
        f"id -u {user} > /dev/null 2>&1 || useradd --create-home --shell /bin/bash {user}",
        f"install -d -o {user} -g $(id -g {user}) -- {shlex.quote(workdir(machine))}",
    )


def _files(machine: Machine, family: Path) -> list[dict[str, object]]:
    steps: list[dict[str, object]] = []
    for number, (target, source) in enumerate(machine.files):
        name = f"{SOURCES}/{number}"
        copy = family / name
        try:
            if Path(source).is_dir():
                shutil.copytree(source, copy, symlinks=True)
                list_files(family, copy, called="the directory")
            else:
                shutil.copy(source, copy)
        except OSError as error:
            raise UsageError(f"{source} cannot be copied for {target}: {error.strerror or error}.") from error
        except TaskFamilyError as error:
            problem = error.message.replace(f"{name}/", "")
            raise UsageError(f"{source} cannot be copied for {target}: {problem}") from error
        steps.append({"type": "file", "source": name, "destination": target})
    return steps


def _services(machine: Machine, family: Path) -> list[dict[str, object]]:
    steps: list[dict[str, object]] = []
    for name, command in machine.services:
        # systemd replaces % and $ itself, and knows of JSON only the escapes (systemd.service, "Command lines").
        argument = json.dumps(command, ensure_ascii=False).replace("%", "%%").replace("$", "$$")
        unit = f"{name}.service"
        (family / SOURCES / unit).write_text(_UNIT.format(name=name, command=argument))
        steps.append({"type": "file", "source": f"{SOURCES}/{unit}", "destination": f"/etc/systemd/system/{unit}"})
        steps.append(_shell(part(f"service {name}"), f"systemctl enable {unit}"))
    return steps


# 2000-01-01: an archive's name comes from its bytes, and zip files can hold no time before 1980.
TIME = 946_684_800
# Inspect writes its logs where it is started, often into the eval's own directory. Copies of them would make another
# image of it for each eval, and hold the answers of earlier ones.
LOG_SUFFIX = ".eval"


def pack(source: Path, target: str, directory: Path) -> str:
    """Writes an archive with one member, or one directory, which has the name of the archive without `.tar`.

    Owner and group of all is root. Links are kept as they are. Inspect's logs are left out of a directory, with the
    directories in which nothing else is.

    Args:
        source: what is packed.
        target: the path of the archive in the machine, NAME.tar.
        directory: where the archive is written here.

    Returns:
        its path here.

    Raises:
        UsageError: a file cannot be read, or is neither a file, a directory nor a link.
    """
    path = directory / PurePosixPath(target).name
    root = source.resolve()

    def packed(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        inside = PurePosixPath(member.name).relative_to(path.stem)
        return None if inside.parts and _is_of_logs(root / inside) else _same_for_all(member)

    try:
        with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as archive:
            archive.add(root, path.stem, filter=packed)
    except OSError as error:
        raise UsageError(f"{error.filename or source} cannot be copied: {error.strerror or error}.") from error
    return str(path)


def _is_of_logs(path: Path) -> bool:
    """Returns whether a path is a log of Inspect, or a directory with logs alone."""
    if path.is_symlink() or not path.is_dir():
        return path.suffix == LOG_SUFFIX
    entries = list(path.iterdir())
    return bool(entries) and all(entry.suffix == LOG_SUFFIX for entry in entries)


def _same_for_all(member: tarfile.TarInfo) -> tarfile.TarInfo:
    if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
        raise UsageError(f"{member.name} is neither a file, a directory nor a link, and cannot be copied.")
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    member.mtime = TIME
    return member


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
