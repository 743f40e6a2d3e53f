"""Finds and removes what exists in a home's environments directory, with or without a record. For the sweep.

A process belongs to an environment by its working directory, which the kernel still names when the directory is gone.
Only our own programs are ever ended: an operator's shell may be in the directory, too. A QEMU that a machine has taken
over can change its working directory and its arguments, so each machine's directory is also asked for its QEMU.
"""

from __future__ import annotations

import contextlib
import os
from datetime import UTC, datetime
from pathlib import Path

from provisioner.base.errors import InfrastructureError, StillThereError
from provisioner.clouds.cloud import EnvironmentResources
from provisioner.clouds.local import machine
from provisioner.clouds.local.vm import qemu
from provisioner.store.files import remove_tree
from provisioner.store.home import Home


def survey(home: Home) -> list[EnvironmentResources]:
    """Lists the directory and the processes of each environment that has any."""
    processes = _processes(home)
    directories = {path.name: path for path in home.environments.glob("*/")}
    surveyed = []
    for name in sorted({*processes, *directories}):
        resources = [f"process {pid} ({what})" for pid, what in sorted(processes.get(name, {}).items())]
        created_at = None
        if name in directories:
            resources.append(f"directory {directories[name]}")
            with contextlib.suppress(FileNotFoundError):
                created_at = datetime.fromtimestamp(directories[name].stat().st_mtime, UTC)
        surveyed.append(
            EnvironmentResources(
                environment=name, resources=tuple(resources), home=home.identity, created_at=created_at
            )
        )
    return surveyed


def clear(home: Home, environment: str) -> None:
    """Ends an environment's processes and removes its directory. Safe to repeat.

    Raises:
        StillThereError: a process would not end.
        InfrastructureError: the directory could not be removed.
    """
    try:
        errors = []
        for pid in _processes(home, environment).get(environment, {}):

            def running(pid: int = pid) -> int | None:
                return pid if pid in _processes(home, environment).get(environment, {}) else None

            try:
                machine.end(running)
            except (machine.MachineError, OSError) as error:
                errors.append(str(error))
        if errors:
            raise StillThereError(f"{environment}: {'; '.join(errors)}")
        remove_tree(home.environments / environment)
    except OSError as error:
        raise InfrastructureError(f"{environment}: {error}") from error


def _processes(home: Home, only: str = "*") -> dict[str, dict[int, str]]:
    """Environment id -> pid -> program, of our programs that work in an environment of the home, and of its QEMUs.

    Args:
        only: the environment whose machines are asked for their QEMUs; by default all are.
    """
    root = os.path.realpath(home.environments)
    by_environment: dict[str, dict[int, str]] = {}
    for process in Path("/proc").glob("[0-9]*"):
        # Processes end while we look, and other users' processes are not readable.
        with contextlib.suppress(OSError):
            working_directory = str((process / "cwd").readlink()).removesuffix(" (deleted)")
            program = _program(process)
            if program and working_directory.startswith(root + os.sep):
                environment = Path(working_directory[len(root) + 1 :]).parts[0]
                by_environment.setdefault(environment, {})[int(process.name)] = program
    for directory in home.environments.glob(f"{only}/"):
        with contextlib.suppress(OSError):  # it is being removed
            for pid in (qemu.live_pid(path / qemu.PIDFILE) for path in directory.iterdir()):
                if pid is not None:
                    by_environment.setdefault(directory.name, {})[pid] = "QEMU"
    return by_environment


def _program(process: Path) -> str | None:
    """The name of the program, if it is ours; None otherwise."""
    argv = (process / "cmdline").read_bytes().split(b"\0")
    name = Path(os.fsdecode(argv[0])).name
    if name.startswith("qemu-system-"):
        return "QEMU"
    modules = [os.fsdecode(argument) for argument in argv if argument.startswith(b"provisioner.clouds.local.")]
    return modules[0].rpartition(".")[2] if modules and b"-m" in argv else None
