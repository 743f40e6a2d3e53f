"""Measures how long the local cloud takes, and the same machines without Terraform and driver.

Usage: python benchmarks/local.py [--rounds N]

"Raw" starts QEMU on the same images with the same flags, primary machine and aux VM at once, until both run a command
over SSH. The ratio `up` / raw shows how much Terraform, the isolation probes and start() add. Timings on a shared
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


def raw_boot(session: Session, like: Environment) -> float:
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


def main() -> None:
    """Runs the rounds and prints the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    home = Home.default()
    home.make()
    session = Session(home=home, cloud=LocalCloud(home, load_settings()), variables=VARIABLES)
    family = load_family(FAMILY)
    lifecycle.plan(session, family, TASK)
    figures: dict[str, list[float]] = {}
    for _ in range(rounds):
        seconds, environment = timed(lambda: lifecycle.up(session, family, TASK))
        figures.setdefault("up", []).append(seconds)
        for phase in environment.phases:
            figures.setdefault(f"  {phase.name}", []).append(phase.seconds)
        figures.setdefault("score", []).append(timed(lambda: lifecycle.score(session, environment, "1"))[0])  # noqa: B023
        figures.setdefault("destroy", []).append(timed(lambda: lifecycle.destroy(session, environment))[0])  # noqa: B023
        figures.setdefault("raw boot to SSH", []).append(raw_boot(session, environment))
    for name, values in figures.items():
        print(f"{name:18} {statistics.median(values):7.2f} s   ({', '.join(f'{value:.2f}' for value in values)})")
    ratio = statistics.median(figures["up"]) / statistics.median(figures["raw boot to SSH"])
    print(f"{'up / raw boot':18} {ratio:7.2f}")


if __name__ == "__main__":
    main()
