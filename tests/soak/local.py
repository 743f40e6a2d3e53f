"""The soak test's work on `local`: whole runs in real machines."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Self

from provisioner.clouds.local import orphans
from provisioner.costs.ledger import Ledger
from provisioner.store.environments import EnvironmentStore
from provisioner.store.files import is_locked
from provisioner.store.home import TEMPLATES, UNFINISHED, Home
from tests.command_line import CLI, ROOT, provisioner, variables
from tests.homes import cache

FAMILY = ROOT / "examples" / "number_guess"
LIMIT_SECONDS = 60
# A watchdog looks twice a minute at least; power-off takes a few seconds.
GRACE_SECONDS = 60


def _link(source: str, destination: str) -> None:
    """Links a file instead of copying it, if possible."""
    try:
        os.link(source, destination)
    except OSError:
        shutil.copy(source, destination)


def copy_base_images(home: Home) -> None:
    """Gives a home the tests' base images, without their templates, and the result of the trial of KVM."""
    kept = Home(cache())
    home.make()
    for image in kept.images.glob("base-*"):
        without = shutil.ignore_patterns(TEMPLATES)
        shutil.copytree(image, home.images / image.name, copy_function=_link, ignore=without)
    with contextlib.suppress(FileNotFoundError):
        shutil.copy(kept.root / "kvm.json", home.root / "kvm.json")


def remains(home: Home) -> list[str]:
    """Lists what should be gone once no environment exists: of environments, images and templates, and processes."""
    things = [thing for orphan in orphans.survey(home) for thing in orphan.resources]
    things += [str(path) for path in home.images.glob(".*")]
    things += [str(path) for path in home.images.glob(f"*/{TEMPLATES}/{UNFINISHED}*")]
    locks = [*home.locks.glob("*"), *home.images.glob(f"*/{TEMPLATES}/*.lock")]
    things += [f"lock {path}" for path in locks if is_locked(path)]
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str((process / "cwd").readlink()).startswith(str(home.root)):
                things.append(f"process {process.name}")
    return things


class LocalWork:
    """Does runs on its own home, which has only base images at first."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._home = Home(directory / "home")
        self._log = directory / "log"

    def __enter__(self) -> Self:
        kept = Home(cache())
        built = provisioner(kept, "image", "build", str(FAMILY))
        assert built.returncode == 0, built.stderr
        copy_base_images(self._home)
        return self

    def __exit__(self, *_: object) -> None: ...

    def _family(self, number: int) -> Path:
        """Writes a family that was never built before."""
        family = self._directory / f"family-{number}" / FAMILY.name
        shutil.copytree(FAMILY, family)
        (family / "salt.txt").write_text(f"{number} {time.time_ns()}\n")
        return family

    def _launch(self, *arguments: str) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [*CLI, *arguments], env=variables(self._home), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def start(self, number: int) -> subprocess.Popen[bytes]:
        """Starts a whole run."""
        self._log.unlink(missing_ok=True)
        submission = self._directory / "submission.txt"
        submission.write_text("42")
        return self._launch("run", str(self._family(number)), "easy", "--submission-file", str(submission))

    def phase(self) -> str:
        """Returns the last output of the run."""
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if re.match(r" +[\d.]+s ", line)]
        return lines[-1].split("s ", 1)[1][:60] if lines else "starting"

    def unlimited(self) -> list[str]:
        """Returns the machines without a time to live."""
        problems = []
        for record in EnvironmentStore(self._home).readable():
            for role in record.machines:
                directory = self._home.environments / record.id / role
                if (directory / "run/qemu.pid").exists() and not (directory / "expires_at").exists():
                    problems.append(f"{record.id} {role} has no limit")
        return problems

    def sweep(self) -> int:
        """Sweeps and returns the number of orphans."""
        done = provisioner(self._home, "sweep")
        assert done.returncode == 0, done.stderr
        return sum(1 for line in done.stdout.splitlines()[2:] if line.strip())

    def left(self) -> list[str]:
        """Returns the resources that should be gone."""
        things = remains(self._home)
        things += [str(path) for path in self._home.stacks.glob("*/") if path.name != ".initialised"]
        things += [f"hold {entry.environment}" for entry in Ledger(self._home.ledger).entries(unsettled=True)]
        return things

    def end_by_limit(self, shares: list[float]) -> int:
        """Abandons environments and builders at once, waits for their ends, and returns how many outlived theirs."""
        built = str(self._family(999))
        assert provisioner(self._home, "image", "build", built).returncode == 0
        for number, share in enumerate(shares):
            command = ("up", built, "easy") if number % 2 else ("image", "build", str(self._family(number)))
            controller = self._launch(*command, "--ttl", f"{LIMIT_SECONDS}s")
            time.sleep(share * LIMIT_SECONDS / 2)
            os.kill(controller.pid, signal.SIGKILL)
            controller.wait()
        machines = {record.id: record for record in EnvironmentStore(self._home).readable()}
        last = max((record.expires_at.timestamp() for record in machines.values()), default=time.time())
        while time.time() < last + GRACE_SECONDS and self._running():
            time.sleep(1)
        running = self._running()
        print(
            f"{len(shares)} abandoned, {len(machines)} had machines or records; LEFT {running}"
            if running
            else f"{len(shares)} abandoned, {len(machines)} had machines or records, all ended by their limit",
            flush=True,
        )
        self.sweep()
        return int(bool(running or self.left()))

    def _running(self) -> list[str]:
        return [
            thing for orphan in orphans.survey(self._home) for thing in orphan.resources if thing.startswith("process ")
        ]
