"""Starts machines of one image as terraform/local does, but without Terraform: for tests of what they share."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

from provisioner.clock import now
from provisioner.machines.boot import boot_machines
from provisioner.machines.create import record_environment
from provisioner.models import Endpoint, Environment, MachineRecord, MachineSize, TaskSetup
from provisioner.remote.ssh import Connection
from provisioner.session import Session
from provisioner.store.environments import new_id
from tests.command_line import ROOT


def planned(session: Session, image: str, *, disk_gib: int = 16, internet: bool = False) -> Environment:
    """Records an environment with one small machine, whose time to live differs from every other's."""
    created_at = now()
    identity = new_id("clone", None)
    machine = MachineRecord(image=image, size=MachineSize(cpus=1, memory_gib=0.5, disk_gib=disk_gib), user="root")
    environment = Environment(
        id=identity, cloud="local", stack=identity, family="clone", task="main", status="creating", attended=True,
        created_at=created_at, expires_at=created_at + timedelta(minutes=30), setup=TaskSetup(),
        full_internet=internet, machines={"primary": machine},
    )  # fmt: skip
    record_environment(session, environment)
    return environment


def starting(session: Session, environment: Environment) -> subprocess.Popen[bytes]:
    """Starts the program that starts the machine."""
    record = environment.machines["primary"]
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
        "PROVISIONER_MACHINE_DIRECTORY": str(session.home.environments / environment.id / "primary"),
        "PYTHONPATH": str(ROOT),
    }
    argv = [sys.executable, "-m", "provisioner.clouds.local.machine", "start"]
    return subprocess.Popen(argv, env={**os.environ, **values}, stdin=subprocess.DEVNULL)


def started(session: Session, environment: Environment) -> Environment:
    """Waits until the machine has started, and returns the record with its endpoint."""
    with starting(session, environment) as process:
        assert process.wait() == 0
    path = session.home.environments / environment.id / "primary" / "endpoint.json"
    endpoint = Endpoint.model_validate_json(path.read_bytes())
    return environment.model_copy(update={"endpoints": {"primary": endpoint}})


@contextlib.contextmanager
def running(session: Session, image: str, count: int) -> Iterator[list[tuple[Environment, Connection]]]:
    """Yields machines that started at once, each with a login as root, and removes them afterwards."""
    environments = []
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            environments.append(planned(session, image))
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
