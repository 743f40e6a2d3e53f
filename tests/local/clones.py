"""Starts machines as terraform/local does, but without Terraform: for tests of what they share, and to measure them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

from provisioner.base.clock import now
from provisioner.base.models import Endpoint, Environment, MachineRecord, MachineSize, Role, TaskSetup
from provisioner.machines.boot import boot_machines
from provisioner.machines.create import record_environment
from provisioner.session import Session
from provisioner.ssh.connection import Connection
from provisioner.store.environments import new_id
from tests.command_line import ROOT


def planned(session: Session, image: str, *, disk_gib: int = 16, internet: bool = False) -> Environment:
    """Records an environment with one small machine of two CPUs, whose time to live differs from every other's."""
    created_at = now()
    identity = new_id("clone", None)
    machine = MachineRecord(image=image, size=MachineSize(cpus=2, memory_gib=0.5, disk_gib=disk_gib), user="root")
    environment = Environment(
        id=identity, cloud="local", stack=identity, family="clone", task="main", status="creating", attended=True,
        created_at=created_at, expires_at=created_at + timedelta(minutes=30), setup=TaskSetup(),
        full_internet=internet, machines={"primary": machine},
    )  # fmt: skip
    record_environment(session, environment)
    return environment


def starting(
    session: Session, environment: Environment, *through: str, role: Role = "primary"
) -> subprocess.Popen[str]:
    """Starts the program that starts a machine; `through` is a module, with arguments, that runs it."""
    record = environment.machines[role]
    settings = {
        "image": str(session.images.disk(record.image)),
        "cpus": record.size.cpus,
        "memory_gib": record.size.memory_gib,
        "disk_gib": record.size.disk_gib,
        "public_key": session.environments.key(environment.id, "controller").public,
        "full_internet": environment.full_internet,
        "allowed_destinations": [],
    }
    values = {
        "PROVISIONER_MACHINE": json.dumps(settings),
        "PROVISIONER_MACHINE_DIRECTORY": str(session.home.environments / environment.id / role),
        "PYTHONPATH": str(ROOT),
    }
    argv = [sys.executable, "-m", *through, "provisioner.clouds.local.machine", "start"]
    return subprocess.Popen(
        argv, env={**os.environ, **values}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip


def started(session: Session, environment: Environment) -> Environment:
    """Starts all machines at once, and returns the record with their endpoints."""
    directory, endpoints = session.home.environments / environment.id, {}
    processes = {role: starting(session, environment, role=role) for role in environment.machines}
    for role, process in processes.items():
        with process:
            _, said = process.communicate()
        assert process.returncode == 0, said
        endpoints[role] = Endpoint.model_validate_json((directory / role / "endpoint.json").read_bytes())
    return environment.model_copy(update={"endpoints": endpoints})


@contextlib.contextmanager
def running(
    session: Session, image: str, count: int, *, disk_gib: int = 16
) -> Iterator[list[tuple[Environment, Connection]]]:
    """Yields machines that started at once, each with a login as root, and removes them afterwards."""
    environments = []
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            environments.append(planned(session, image, disk_gib=disk_gib))
            stack.callback(remove, session, environments[-1])

        def up(environment: Environment) -> tuple[Environment, Connection]:
            up = started(session, environment)
            return up, boot_machines(session, up)["primary"]

        with ThreadPoolExecutor(count) as pool:
            reached = list(pool.map(up, environments))
        for _, connection in reached:
            stack.enter_context(connection)
        yield reached


def remove(session: Session, environment: Environment) -> None:
    """Ends the machine and forgets that it was there."""
    session.cloud.remove(environment)
    session.environments.forget(environment.id)


def in_directory(path: Path) -> list[int]:
    """The processes whose working directory it is, or was."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str((process / "cwd").readlink()).startswith(str(path.resolve())):
                found.append(int(process.name))
        except OSError:
            continue
    return found
