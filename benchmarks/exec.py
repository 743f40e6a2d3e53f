"""Measures how long `provisioner exec ENV -- true` takes, as an operator types it, on the local cloud.

Usage: python benchmarks/exec.py [--rounds N] [--checkout DIRECTORY]...

"first" opens the connection that OpenSSH keeps, "later" goes over it, and "alone" is on a host without OpenSSH: each
command opens a connection of its own. Other checkouts' command lines are measured in the same rounds and the same
machine; one that keeps no connections is as fast the first time as later. "library" is the same in this process,
without the start of an interpreter; a file of 100 MB is copied there, too. Timings on a shared machine are noisy: only
compare figures of one run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.local import FAMILY, TASK, VARIABLES, timed  # noqa: E402
from provisioner import Home, LocalCloud, Session, load_family, load_settings  # noqa: E402
from provisioner.base.models import Environment, Role  # noqa: E402
from provisioner.copying.transfer import upload  # noqa: E402
from provisioner.environment import lifecycle, planning  # noqa: E402
from provisioner.machines.connect import (  # noqa: E402
    connect,
    connect_kept,
    end_kept,
)
from provisioner.ssh.calls import Calls  # noqa: E402

COPIED_BYTES = 100_000_000

Way = Callable[[Session, Environment, Role], Calls]


def command(checkout: Path, environment: Environment, path: str) -> None:
    """Runs `exec` with a search path for programs."""
    argv = [sys.executable, str(checkout / "cli.py"), "exec", environment.id, "--", "true"]
    subprocess.run(argv, env={**os.environ, "PATH": path}, stdin=subprocess.DEVNULL, check=True)


def call(session: Session, environment: Environment, way: Way) -> float:
    """Connects one way, runs a command, and returns the seconds that a second command takes."""
    with way(session, environment, "primary") as connection:
        connection.run(["true"])
        return timed(partial(connection.run, ["true"]))[0]


def measure(session: Session, environment: Environment, checkouts: list[Path], figures: dict[str, list[float]]) -> None:
    """Does one round, and adds its figures."""
    for checkout in checkouts:
        end_kept(session, environment)
        for name, path in (("first", os.environ["PATH"]), ("later", os.environ["PATH"]), ("alone", "/nonexistent")):
            seconds, _ = timed(partial(command, checkout, environment, path))
            figures.setdefault(f"{checkout}: {name}", []).append(seconds)
    ways: dict[str, Way] = {"alone": connect, "later": connect_kept}
    for name, way in ways.items():
        both, one = timed(partial(call, session, environment, way))
        figures.setdefault(f"library: a call on an open connection, {name}", []).append(one)
        figures.setdefault(f"library: connection and call, {name}", []).append(both - one)
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(COPIED_BYTES)
        with connect(session, environment, "primary") as connection:
            seconds, _ = timed(partial(upload, connection, Path(file.name), "/root/copied"))
    figures.setdefault(f"library: cp of {COPIED_BYTES // 1_000_000} MB", []).append(seconds)


def main() -> None:
    """Runs the rounds and prints the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--checkout", type=Path, action="append", default=[])
    options = parser.parse_args()
    home = Home.default()
    home.make()
    session = Session(home=home, cloud=LocalCloud(home, load_settings()), variables=VARIABLES)
    planning.plan(session, load_family(FAMILY), TASK)
    environment = lifecycle.up(session, load_family(FAMILY), TASK)
    figures: dict[str, list[float]] = {}
    try:
        for _ in range(options.rounds):
            measure(session, environment, [ROOT, *options.checkout], figures)
    finally:
        lifecycle.destroy(session, environment)
    width = max(map(len, figures))
    for name, values in figures.items():
        print(f"{name:{width}} {statistics.median(values):6.2f} s   ({', '.join(f'{each:.2f}' for each in values)})")


if __name__ == "__main__":
    main()
