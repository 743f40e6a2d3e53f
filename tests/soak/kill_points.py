"""Kills the controller, or Terraform under it, at moments spread over its work; then looks what is left.

Usage: python -m tests.soak.kill_points [--cloud local|aws] [--points 50] [--victim controller|terraform|both]
                                        [--workers 2] [--without-sweep] [--seed 1]

On `local`, each point is a whole `provisioner run` of a family that was never built before, in real machines: image
build, create, boot, isolation, start, score, destroy. On `aws`, it is the same work on the account (image builders and
environments in turns) with the real provider against a moto server, which has no machines to boot. After each kill,
`sweep`; then nothing may be left. Before that, every instance must have its limit.

With --without-sweep (local), environments and image builders get a limit of a minute, are abandoned, and must end by
themselves. Prints a line for each point; ends with exit code 1 if anything was left.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.soak.aws import AwsWork
from tests.soak.local import LocalWork
from tests.soak.processes import descendants

WORKS: dict[str, Callable[[Path], LocalWork | AwsWork]] = {"local": LocalWork, "aws": AwsWork}
# Only ends what hangs: beside other work, an emulated machine takes minutes for what takes it seconds alone.
END_SECONDS = 1800
PATIENCE_SECONDS = 60


@dataclass(frozen=True)
class Point:
    """When to kill what.

    Args:
        share: of the whole work's time, from 0 to 1.
    """

    number: int
    share: float
    victim: str


def points(count: int, victim: str, seed: int) -> list[Point]:
    """Moments spread evenly, each shaken a little."""
    shaken = random.Random(seed)
    victims = ("controller", "terraform") if victim == "both" else (victim,)
    return [
        Point(number, (number + shaken.random()) / count, victims[number % len(victims)]) for number in range(count)
    ]


def kill(controller: subprocess.Popen[bytes], victim: str) -> str:
    """Kills the controller, or the next Terraform that it runs; says what was hit."""
    if victim == "controller":
        if controller.poll() is not None:
            return "it had ended"
        os.kill(controller.pid, signal.SIGKILL)
        controller.wait()
        return "controller killed"
    deadline = time.monotonic() + PATIENCE_SECONDS
    while controller.poll() is None and time.monotonic() < deadline:
        if pids := descendants(controller.pid, "terraform"):
            os.kill(pids[0], signal.SIGKILL)
            controller.wait(END_SECONDS)
            return f"terraform killed, exit code {controller.returncode}"
        time.sleep(0.01)
    controller.wait(END_SECONDS)
    return "no terraform ran any more"


def work_through(cloud: str, mine: list[Point], directory: Path, whole_seconds: float | None) -> int:
    """One worker: its points one after the other; returns how many left something."""
    work = WORKS[cloud](directory)
    failures = 0
    with work:
        if whole_seconds is None:
            begin = time.monotonic()
            work.start(999).wait(END_SECONDS)
            whole_seconds = time.monotonic() - begin
            if left := work.left():
                print(f"without any kill: LEFT {left}", flush=True)
                return 1
        for point in mine:
            # One kind of work is shorter than another.
            controller = work.start(point.number)
            time.sleep(point.share * whole_seconds)
            phase = work.phase()
            hit = kill(controller, point.victim)
            unlimited = work.unlimited()
            swept = work.sweep()
            left = work.left() + unlimited
            failures += bool(left)
            print(
                f"{point.number:3d} at {point.share * whole_seconds:5.1f} s, {phase}: {hit}; swept {swept}; "
                + (f"LEFT {left}" if left else "nothing left"),
                flush=True,
            )
    return failures


def main() -> int:
    """Spreads the points over worker processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cloud", choices=sorted(WORKS), default="local")
    parser.add_argument("--points", type=int, default=50)
    parser.add_argument("--victim", choices=["controller", "terraform", "both"], default="both")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--without-sweep", action="store_true")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        mine = points(options.points, options.victim, options.seed)[options.worker :: options.workers]
        directory = Path(tempfile.mkdtemp(prefix="provisioner-soak-"))
        try:
            if options.without_sweep:
                with LocalWork(directory) as work:
                    return work.end_by_limit([point.share for point in mine])
            return min(1, work_through(options.cloud, mine, directory, None))
        finally:
            shutil.rmtree(directory, ignore_errors=True)
    begin = time.monotonic()
    workers = [
        subprocess.Popen([sys.executable, "-m", "tests.soak.kill_points", *sys.argv[1:], "--worker", str(number)])
        for number in range(min(options.workers, options.points))
    ]
    failed = [worker.wait() for worker in workers]
    print(f"{options.points} points in {time.monotonic() - begin:.0f} s: {'LEFTOVERS' if any(failed) else 'all clean'}")
    return int(any(failed))


if __name__ == "__main__":
    sys.exit(main())
