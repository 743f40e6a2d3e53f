"""Prints what short commands cost in CPU seconds, beside the start of Python itself.

Usage: python benchmarks/startup.py [--rounds N]

CPU seconds are user and system time of the whole process, as the kernel counts them. Each command runs once before it
is measured, so that Python has written its bytecode; commands take turns, so that a busy minute touches all alike.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

from provisioner.base.clock import now
from provisioner.base.models import Environment, MachineRecord, MachineSize, TaskSetup
from provisioner.store.environments import EnvironmentStore
from provisioner.store.home import Home

ROOT = Path(__file__).parents[1]
ENVIRONMENT = "sums-small-bcd234"
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "--help": ["cli.py", "--help"],
    "list": ["cli.py", "list"],
    f"show {ENVIRONMENT}": ["cli.py", "show", ENVIRONMENT],
    "doctor": ["cli.py", "doctor"],
}


def record(identity: str) -> Environment:
    """An environment's record, as `list` and `show` read it."""
    size = MachineSize(cpus=1, memory_gib=1, disk_gib=8)
    return Environment(
        id=identity,
        cloud="local",
        stack=identity,
        family="sums",
        task="small",
        status="ready",
        created_at=now(),
        expires_at=now() + timedelta(hours=4),
        setup=TaskSetup(instructions="Add."),
        full_internet=False,
        machines={"primary": MachineRecord(image="family-sums", size=size, user="root")},
    )


def cpu_seconds(arguments: list[str], environment: dict[str, str]) -> float:
    """User and system time of one run, in seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        check=False,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)


def main() -> None:
    """Measures the commands on a home with ten environments and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as directory:
        home = Home(Path(directory) / "home")
        home.make()
        store = EnvironmentStore(home)
        for identity in (ENVIRONMENT, *(f"sums-small-other{number}" for number in range(9))):
            store.save(record(identity))
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        environment |= {"PROVISIONER_HOME": str(home.root), "PYTHONPYCACHEPREFIX": f"{directory}/bytecode"}
        for arguments in COMMANDS.values():
            cpu_seconds(arguments, environment)
        figures: dict[str, list[float]] = {name: [] for name in COMMANDS}
        for _ in range(rounds):
            for name, arguments in COMMANDS.items():
                figures[name].append(cpu_seconds(arguments, environment))
    print(f"CPU seconds of {rounds} runs each, Python {sys.version.split()[0]}")
    print(f"{'':24}{'median':>8}{'least':>8}{'most':>8}")
    for name, seconds in figures.items():
        print(f"{name:24}{statistics.median(seconds):8.2f}{min(seconds):8.2f}{max(seconds):8.2f}")


if __name__ == "__main__":
    main()
