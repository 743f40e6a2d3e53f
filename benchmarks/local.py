"""Measures how long the local cloud takes, and the same machines without Terraform and driver.

Usage: python benchmarks/local.py [--rounds N]

Everything is measured twice in each round: with machines that go on from a template, and with machines that boot. "Raw"
starts QEMU on the same images with the same flags, primary machine and aux VM at once, until both run a command over
SSH. The ratio `up` / raw boot shows how much Terraform, the isolation probes and start() add. Timings on a shared
machine are noisy: only compare figures of one run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from provisioner import Home, LocalCloud, Session, load_family, load_settings
from provisioner.environment import lifecycle
from provisioner.machines.boot import boot_machines
from provisioner.machines.create import record_environment
from provisioner.models import Endpoint, Environment
from provisioner.store.environments import new_id

FAMILY = Path(__file__).parents[1] / "tests" / "local" / "families" / "lab"
TASK = "pair"
VARIABLES = {"LAB_TOKEN": "benchmark-token", "LAB_OTHER": "benchmark-other"}

T = TypeVar("T")


def timed(function: Callable[[], T]) -> tuple[float, T]:
    """Calls a function; returns the seconds that it took, and its result."""
    begin = time.perf_counter()
    value = function()
    return time.perf_counter() - begin, value


def start_machine(session: Session, environment: Environment, role: str) -> subprocess.Popen[bytes]:
    """Starts a machine as terraform/local does, but without Terraform."""
    record = environment.machines[role]  # type: ignore[index]
    directory = session.home.environments / environment.id / role
    settings = {
        "image": str(session.images.disk(record.image)),
        "cpus": record.size.cpus,
        "memory_gib": record.size.memory_gib,
        "disk_gib": record.size.disk_gib,
        "public_key": session.environments.key(environment.id, "controller").public,
        "full_internet": False,
        "allowed_destinations": [],
    }
    return subprocess.Popen(
        [sys.executable, "-m", "provisioner.clouds.local.machine", "start"],
        env={
            **os.environ,
            "PROVISIONER_MACHINE": json.dumps(settings),
            "PROVISIONER_MACHINE_DIRECTORY": str(directory),
            "PYTHONPATH": str(FAMILY.parents[3]),
        },
    )


def raw_start(session: Session, like: Environment) -> float:
    """Starts machines like those of `like` without Terraform; returns the seconds until they run a command by SSH."""
    environment = like.model_copy(update={"id": new_id("raw", None), "endpoints": {}})
    record_environment(session, environment)

    def boot() -> None:
        started = [start_machine(session, environment, role) for role in environment.machines]
        assert [process.wait() for process in started] == [0, 0]
        endpoints = {
            role: Endpoint.model_validate_json(
                (session.home.environments / environment.id / role / "endpoint.json").read_bytes()
            )
            for role in environment.machines
        }
        reached = boot_machines(session, environment.model_copy(update={"endpoints": endpoints}))
        for connection in reached.values():
            with connection:
                assert connection.run(["true"]).exit_code == 0

    try:
        return timed(boot)[0]
    finally:
        session.cloud.remove(environment)
        session.environments.forget(environment.id)


def measure(session: Session, figures: dict[str, list[float]], way: str) -> None:
    """Does one round with machines that start one way, and adds its figures."""
    seconds, environment = timed(lambda: lifecycle.up(session, load_family(FAMILY), TASK))
    figures.setdefault(f"{way}: up", []).append(seconds)
    for phase in environment.phases:
        figures.setdefault(f"{way}:   {phase.name}", []).append(phase.seconds)
    figures.setdefault(f"{way}: score", []).append(timed(lambda: lifecycle.score(session, environment, "1"))[0])
    figures.setdefault(f"{way}: destroy", []).append(timed(lambda: lifecycle.destroy(session, environment))[0])
    figures.setdefault(f"{way}: raw, to SSH", []).append(raw_start(session, environment))


def main() -> None:
    """Runs the rounds and prints the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    home, settings = Home.default(), load_settings()
    home.make()
    sessions = {
        way: Session(
            home=home,
            cloud=LocalCloud(home, settings.model_copy(update={"templates": way == "template"})),
            variables=VARIABLES,
        )
        for way in ("template", "boot")
    }
    lifecycle.plan(sessions["boot"], load_family(FAMILY), TASK)
    first, environment = timed(lambda: lifecycle.up(sessions["template"], load_family(FAMILY), TASK))
    lifecycle.destroy(sessions["template"], environment)
    figures: dict[str, list[float]] = {"first up (makes the templates unless they are there)": [first]}
    for _ in range(rounds):
        for way, session in sessions.items():
            measure(session, figures, way)
    for name, values in figures.items():
        print(f"{name:24} {statistics.median(values):7.2f} s   ({', '.join(f'{value:.2f}' for value in values)})")
    boot = statistics.median(figures["boot: raw, to SSH"])
    for way in sessions:
        print(f"{way}: up / raw boot {statistics.median(figures[f'{way}: up']) / boot:7.2f}")


if __name__ == "__main__":
    main()
