"""Evals whose samples fail: each in another step of its beginning, or each in another way while it works."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.util import SandboxEnvironmentSpec, SandboxUnavailableError, sandbox

from provisioner.clouds.local.vm import qemu
from provisioner.inspect.configuration import Configuration, Machine
from provisioner.inspect.sandbox import ProvisionerSandbox
from provisioner.store.environments import EnvironmentStore
from provisioner.store.home import Home

FAMILY = """
class TaskFamily:
    standard_version = "0.5.0"

    @staticmethod
    def get_tasks():
        return {{"main": {{}}}}

    @staticmethod
    def get_instructions(t):
        return ""

    @staticmethod
    def {step}(t):
        raise ValueError("on purpose")
"""


def _raises_in(step: str) -> Configuration:
    """Writes a family that raises an error in one of its functions."""
    family = Path(tempfile.mkdtemp()) / "failing"
    family.mkdir()
    (family / "failing.py").write_text(FAMILY.format(step=step))
    return Configuration(family=str(family), task="main")


def _with_a_wall() -> Machine:
    """Returns a machine that drops the probes of its isolation, which says nothing about it."""
    lines = (
        *("[Unit]", "Before=ssh.service", "[Service]", "Type=oneshot"),
        *("ExecStart=/usr/sbin/iptables -A OUTPUT -d 1.1.1.1 -j DROP", "[Install]", "WantedBy=multi-user.target"),
    )
    unit = "printf '%s\\n' " + " ".join(f"'{line}'" for line in lines)
    return Machine(run=(f"{unit} > /etc/systemd/system/wall.service", "systemctl enable wall.service"))


def _sample(identity: str, *machines: Machine, configuration: Configuration | None = None, **more: Any) -> Sample:
    spec = SandboxEnvironmentSpec("provisioner", configuration or Configuration(machines=machines))
    return Sample(id=identity, input="x", sandbox=spec, **more)


@solver
def never() -> Solver:
    """Raises another error than any step does: no sample may come so far."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        raise RuntimeError("it came to the solver")

    return solve


@task
def in_each_step() -> Task:
    """Each sample fails in another step before the solver, from its image to Inspect's own preparations."""
    fails = Machine(run=("echo ${SAMPLE_METADATA_NO}; false",))
    samples = [
        _sample("image", fails, metadata={"no": "1"}),
        _sample("boot", Machine(services=(("off", "poweroff -f"),))),
        _sample("isolation", _with_a_wall()),
        _sample("start", configuration=_raises_in("start")),
        _sample("files", files={"/proc/no/such/file": "text"}),
        _sample("setup", setup="#!/bin/bash\necho it is not set up >&2\nexit 3\n"),
    ]
    return Task(dataset=samples, solver=never())


async def _raise() -> None:
    assert (await sandbox().exec(["id", "-un"])).stdout == "root\n"
    raise RuntimeError("on purpose")


async def _kill_the_machine() -> None:
    """Kills the machine's QEMU and continues as if nothing were wrong."""
    environment = sandbox().as_type(ProvisionerSandbox).machines.environment
    pid = qemu.live_pid(EnvironmentStore(Home.default()).directory(environment.id) / "primary" / qemu.PIDFILE)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await sandbox().exec(["true"])


async def _kill_the_exec_server() -> None:
    """Kills, as root in the machine, what runs commands there: it is started again once, and then counts as lost."""
    for _ in range(2):
        with contextlib.suppress(SandboxUnavailableError):
            await sandbox().exec(["pkill", "-9", "-f", "exec_server.py"])
    await sandbox().exec(["true"])


WAYS: dict[str, Callable[[], Awaitable[None]]] = {
    "raises": _raise,
    "killed from outside": _kill_the_machine,
    "loses its exec server": _kill_the_exec_server,
}


@solver
def end() -> Solver:
    """Ends in the sample's way."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        await WAYS[str(state.sample_id)]()
        return state

    return solve


@task
def in_each_way() -> Task:
    """Each sample's work ends in another way."""
    return Task(dataset=[_sample(way) for way in WAYS], solver=end())


@task
def raises() -> Task:
    """Its solver raises an error."""
    return Task(dataset=[_sample("raises")], solver=end())
