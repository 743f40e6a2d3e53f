"""Kills `inspect eval` in each phase of its sample's life, and clears away what it leaves.

Usage: python -m tests.soak.eval_kills [MOMENT...] [--seed 1]

Moments are, unless some are named, all eleven: images (one is being built), create, boot, isolation, start, first
score, exec (the solver runs a command), score, teardown, destroy, after (all is gone, the eval's process not yet). A
kill that comes too late for its phase counts as a failure. It hits the eval alone, so that the Terraform that it runs
keeps running, or all its processes.

After each kill `inspect sandbox cleanup provisioner` must leave nothing: no environment, no process, no reservation.
Prints a line for each kill. Ends with exit code 1 if anything was left, or a phase was missed.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from provisioner.costs.ledger import Ledger
from provisioner.store.environments import EnvironmentStore
from provisioner.store.home import Home
from tests.command_line import ROOT, variables
from tests.homes import borrow_images, cache
from tests.inspect.evals import FLAG
from tests.local.test_interruptions import processes_of
from tests.provider_mirror import override_provider, use_provider_mirror

INSPECT = str(Path(sys.executable).with_name("inspect"))
TASK = f"{ROOT}/tests/inspect/evals.py@goes_through_all_phases"
FAMILY = ROOT / "tests" / "soak" / "families" / "phases"
# In the order in which a sample goes through them.
MOMENTS = (
    "images", "create", "boot", "isolation", "start", "first score", "exec", "score", "teardown", "destroy", "after",
)  # fmt: skip
# Images may have to be built before the moment comes.
MOMENT_SECONDS = 900


@dataclass(frozen=True)
class Watched:
    """What a running eval tells of how far it is.

    Args:
        home: its provisioner home.
        directory: where it writes its log and its signs.
    """

    home: Home
    directory: Path

    def is_in(self, moment: str) -> bool:
        """Returns whether the moment has come and is not over."""
        if moment == "images":
            return any(record.kind == "builder" for record in EnvironmentStore(self.home).readable())
        if moment in ("exec", "score"):
            return (self.directory / f"{moment} begun").exists() and not (self.directory / f"{moment} ended").exists()
        if moment == "after":
            return self._has_ended("destroy")
        return self._says(rf"{moment}$") and not self._has_ended(moment)

    def _has_ended(self, phase: str) -> bool:
        return self._says(rf"{phase} took [0-9.]+ s$")

    def _says(self, end: str) -> bool:
        log = self.directory / "python.log"
        return log.exists() and bool(re.search(rf" \(epoch 1\): {end}", log.read_text(errors="replace"), re.MULTILINE))


def kill_at(moment: str, home: Home, directory: Path) -> list[str]:
    """Starts an eval, kills it, and clears away; returns what is wrong afterwards."""
    family = directory / "phases"
    shutil.copytree(FAMILY, family)
    if moment == "images":  # an image that is not built yet
        with (family / "phases.py").open("a") as file:
            file.write(f"\nNAME = {directory.name!r}\n")
    watched = Watched(home, directory)
    environment = {
        **variables(home), FLAG: str(directory), "INSPECT_DISPLAY": "none", "INSPECT_LOG_LEVEL": "debug",
        "INSPECT_PY_LOGGER_FILE": str(directory / "python.log"), "INSPECT_PY_LOGGER_LEVEL": "debug",
    }  # fmt: skip
    command = [INSPECT, "eval", TASK, "--model", "mockllm/model", "--log-dir", str(directory)]
    alone = random.random() < 0.5
    with subprocess.Popen(
        command, cwd=directory, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:  # fmt: skip
        deadline = time.monotonic() + MOMENT_SECONDS
        while not watched.is_in(moment) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        (os.kill if alone else os.killpg)(process.pid, signal.SIGKILL)
    was_hit = process.returncode == -signal.SIGKILL and watched.is_in(moment)
    found = [f"{record.kind} {record.status}" for record in EnvironmentStore(home).readable()]
    print(
        f"{moment}: {'hit' if was_hit else 'MISSED'}, {'the eval alone' if alone else 'all its processes'}; "
        f"there was {', '.join(found) or 'nothing'}",
        flush=True,
    )
    return ([] if was_hit else [f"{moment} was missed"]) + _left_by_clean_up(home)


def _left_by_clean_up(home: Home) -> list[str]:
    environment = variables(home)
    clean_up = [INSPECT, "sandbox", "cleanup", "provisioner"]
    done = subprocess.run(clean_up, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return [done.stdout + done.stderr]
    left = [record.id for record in EnvironmentStore(home).readable()] + processes_of(home)
    return left + [entry.environment for entry in Ledger(home.ledger).entries(unsettled=True)]


def main() -> int:
    """Runs the campaign, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("moments", nargs="*", metavar="MOMENT", help="one of: " + ", ".join(MOMENTS))
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if unknown := set(options.moments) - set(MOMENTS):
        parser.error(f"no such moment: {', '.join(sorted(unknown))}")
    random.seed(options.seed)
    use_provider_mirror()
    override_provider(cache())
    failed = False
    with tempfile.TemporaryDirectory() as name:
        home = borrow_images(Home(cache()), Path(name) / "home")
        for moment in options.moments or MOMENTS:
            directory = Path(tempfile.mkdtemp(dir=name))
            if wrong := kill_at(moment, home, directory):
                print(f"WRONG: {wrong}", flush=True)
                failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
