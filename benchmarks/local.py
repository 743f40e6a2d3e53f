"""Measures how long the local cloud takes, and the same machines without Terraform and driver.

Usage: python benchmarks/local.py [--rounds N] [--environments 1 5 10]

Everything is measured twice in each round: with machines that go on from a template, and with machines that boot. "Raw"
starts QEMU on the same images with the same flags, primary machine and aux VM at once, until both run a command over
SSH. The ratio `up` / raw boot shows how much Terraform, the isolation probes and start() add. Timings on a shared
machine are noisy: only compare figures of one run.

Then that many environments are up at once, with machines that go on from a template, and one more. Memory is the
proportional set size of all their processes.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.batch import pss_mib  # noqa: E402
from provisioner import Home, LocalCloud, Session, load_family, load_settings  # noqa: E402
from provisioner.base.models import Environment  # noqa: E402
from provisioner.environment import lifecycle, planning  # noqa: E402
from provisioner.machines.boot import boot_machines  # noqa: E402
from provisioner.machines.create import record_environment  # noqa: E402
from provisioner.store.environments import new_id  # noqa: E402
from tests.local.clones import remove, started  # noqa: E402

FAMILY = ROOT / "tests" / "local" / "families" / "lab"
TASK = "pair"
VARIABLES = {"LAB_TOKEN": "benchmark-token", "LAB_OTHER": "benchmark-other"}

T = TypeVar("T")


def timed(function: Callable[[], T]) -> tuple[float, T]:
    """Calls a function; returns the seconds that it took, and its result."""
    begin = time.perf_counter()
    value = function()
    return time.perf_counter() - begin, value


def raw_start(session: Session, like: Environment) -> float:
    """Starts machines like those of `like` without Terraform; returns the seconds until they run a command by SSH."""
    environment = like.model_copy(update={"id": new_id("raw", None), "endpoints": {}})
    record_environment(session, environment)

    def boot() -> None:
        for connection in boot_machines(session, started(session, environment)).values():
            with connection:
                assert connection.run(["true"]).exit_code == 0

    try:
        return timed(boot)[0]
    finally:
        remove(session, environment)


def measure(session: Session, figures: dict[str, list[float]], way: str) -> None:
    """Does one round with machines that start one way, and adds its figures."""
    seconds, environment = timed(lambda: lifecycle.up(session, load_family(FAMILY), TASK))
    figures.setdefault(f"{way}: up", []).append(seconds)
    for phase in environment.phases:
        figures.setdefault(f"{way}:   {phase.name}", []).append(phase.seconds)
    figures.setdefault(f"{way}: score", []).append(timed(lambda: lifecycle.score(session, environment, "1"))[0])
    seconds, phases = timed(lambda: lifecycle.destroy(session, environment))
    figures.setdefault(f"{way}: teardown and destroy", []).append(seconds)
    for phase in phases:
        figures.setdefault(f"{way}:   {phase.name}", []).append(phase.seconds)
    figures.setdefault(f"{way}: raw, to SSH", []).append(raw_start(session, environment))


def memory_mib(session: Session) -> float:
    """Returns the memory of all processes that work in one of the home's environments."""
    root, total = str(session.home.environments.resolve()), 0.0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str((process / "cwd").readlink()).startswith(root):
                total += pss_mib(int(process.name))
    return total


def print_memory(session: Session, counts: list[int]) -> None:
    """Prints the memory of so many environments, and what one more adds for each of its machines."""
    environments: list[Environment] = []
    before = memory_mib(session)
    total = 0.0
    try:
        for count in [*counts, counts[-1] + 1]:
            last, many = total, len(environments)
            while len(environments) < count:
                environments.append(lifecycle.up(session, load_family(FAMILY), TASK))
            total = memory_mib(session) - before
            each = (total - last) / sum(len(each.machines) for each in environments[many:])
            print(f"memory of {count:2} environments {total:7.0f} MiB, {each:4.0f} for each machine added", flush=True)
    finally:
        for environment in environments:
            lifecycle.destroy(session, environment)


def main() -> None:
    """Runs the rounds and prints the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--environments", type=int, nargs="+", default=[1, 5, 10])
    options = parser.parse_args()
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
    planning.plan(sessions["boot"], load_family(FAMILY), TASK)
    first, environment = timed(lambda: lifecycle.up(sessions["template"], load_family(FAMILY), TASK))
    lifecycle.destroy(sessions["template"], environment)
    figures: dict[str, list[float]] = {"first up (makes the templates unless they are there)": [first]}
    for _ in range(options.rounds):
        for way, session in sessions.items():
            measure(session, figures, way)
    for name, values in figures.items():
        print(f"{name:24} {statistics.median(values):7.2f} s   ({', '.join(f'{value:.2f}' for value in values)})")
    boot = statistics.median(figures["boot: raw, to SSH"])
    for way in sessions:
        print(f"{way}: up / raw boot {statistics.median(figures[f'{way}: up']) / boot:7.2f}", flush=True)
    print_memory(sessions["template"], options.environments)


if __name__ == "__main__":
    main()
