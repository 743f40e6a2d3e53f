"""Kills what makes a template, what starts a machine from it, and what prunes it, before each effect of its work.

Usage: python -m tests.soak.template_kills [--points N] [--seed 1]

After each kill the machine is destroyed and the home swept; then nothing may be left, and no lock be held. Afterwards
two machines start at once: both must resume from a whole template, made anew if it was not there. While all is pruned,
and while the pruning process is killed, another starts a machine from the image that goes. Prints a line for each
point, of which there are 150; N takes that many of each kind. Ends with exit code 1 if anything was left.
"""

from __future__ import annotations

import argparse
import itertools
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from provisioner.base.config import load_settings
from provisioner.base.models import BaseImage
from provisioner.base.progress import Silence
from provisioner.clouds.local.cloud import LocalCloud
from provisioner.clouds.local.frozen import templates
from provisioner.session import Session
from provisioner.store.home import TEMPLATES, Home
from tests.command_line import ROOT, provisioner, variables
from tests.local.clones import planned, remove, started, starting
from tests.soak import moments
from tests.soak.local import copy_base_images, remains

END_SECONDS = 20
BOOTING = ("+1", "+3", "+6")
# A command takes a second or two until it has read which images environments use.
DELAYS = (-0.5, 0.5, 1.0, 1.5, 2.0, 3.0)


class TemplateWork:
    """Works in a home of its own.

    Args:
        home: the home; it gets the tests' base images, without their templates.
    """

    def __init__(self, home: Home) -> None:
        copy_base_images(home)
        settings = load_settings().model_copy(update={"disk_overcommit": 1000})
        self._session = Session(home=home, cloud=LocalCloud(home, settings))
        self._image = self._session.cloud.base_image(BaseImage(role="primary"), Silence())

    def forget_templates(self) -> None:
        """Removes the image's templates."""
        for path in (self._session.images.path(self._image) / TEMPLATES).glob("*/"):
            templates.discard(templates.Template(path))

    def start(self, wanted: str) -> list[str]:
        """Starts a machine until a moment comes, and destroys it; returns the moments that it printed."""
        environment = planned(self._session, self._image)
        try:
            with starting(self._session, environment, *moments.through(wanted)) as process:
                _, said = process.communicate()
            assert process.returncode == (0 if wanted == "-" else moments.KILLED), said
            return moments.passed(said)
        finally:
            remove(self._session, environment)

    def start_two(self) -> list[str]:
        """Starts two machines at once and destroys them; returns what is wrong with how they started."""
        environments = [planned(self._session, self._image) for _ in range(2)]
        try:
            with ThreadPoolExecutor() as pool:
                up = list(pool.map(lambda each: started(self._session, each), environments))
            return [each.endpoints["primary"].origin for each in up if each.endpoints["primary"].origin != "template"]
        finally:
            for each in environments:
                remove(self._session, each)

    def prune(self, wanted: str) -> list[str]:
        """Prunes all images until a moment comes; returns the moments that it printed."""
        done = prune(self._session, wanted)
        assert done.returncode == (0 if wanted == "-" else moments.KILLED), done.stderr
        return moments.passed(done.stderr)

    def prune_beside_start(self, wanted: str, delay_seconds: float) -> list[str]:
        """Prunes all images until a moment comes, and starts a machine meanwhile; returns what is wrong with it."""
        return prune_beside_start(self._session, self._image, wanted, delay_seconds)

    def restore_images(self) -> None:
        """Removes all images and copies them again; returns once they have a template."""
        assert provisioner(self._session.home, "image", "prune", "--all").returncode == 0
        copy_base_images(self._session.home)
        assert self.start_two() == []

    def has_image(self) -> bool:
        """Whether the image counts as whole."""
        return self._session.images.finished(self._image)

    def sweep(self) -> list[str]:
        """Sweeps, and returns what is left all the same."""
        done = provisioner(self._session.home, "sweep")
        assert done.returncode == 0, done.stderr
        deadline = time.monotonic() + END_SECONDS
        while (left := remains(self._session.home)) and time.monotonic() < deadline:
            time.sleep(0.1)  # a killed process's watchdog looks twice a second
        return left


def prune(session: Session, wanted: str) -> subprocess.CompletedProcess[str]:
    """Prunes all images until a moment comes, if it comes."""
    argv = (str(ROOT / "cli.py"), "image", "prune", "--all")
    return moments.run(wanted, *argv, env=variables(session.home), cwd=ROOT)


def prune_beside_start(session: Session, image: str, wanted: str, delay_seconds: float) -> list[str]:
    """Prunes all images until a moment comes, if it comes, while another process starts a machine from one of them.

    Args:
        delay_seconds: when the machine is recorded and begins to start, after the pruning has begun. If negative, its
            record is there so long before, and keeps the image.

    Returns:
        what is wrong with what became of the machine, of the image and of the pruning.
    """
    with ThreadPoolExecutor() as pool:
        if delay_seconds >= 0:
            pruning = pool.submit(prune, session, wanted)
            time.sleep(delay_seconds)
        environment = planned(session, image)
        try:
            with starting(session, environment) as process:
                if delay_seconds < 0:
                    time.sleep(-delay_seconds)
                    pruning = pool.submit(prune, session, wanted)
                _, said = process.communicate()
            pruned = pruning.result()
            wrong = [] if pruned.returncode in (0, moments.KILLED) else [pruned.stderr]
            # Only a machine that was recorded too late may find the image gone. Then there is nothing where it was.
            is_there = session.images.finished(image)
            if process.returncode != 0 and (is_there or delay_seconds < 0):
                wrong.append(said)
            if not is_there and (delay_seconds < 0 or session.images.path(image).exists()):
                wrong.append(f"{image} is not whole")
            return wrong
        finally:
            remove(session, environment)


def campaign(work: TemplateWork, choose: Callable[[list[str]], list[str]]) -> int:
    """Goes through the moments that `choose` returns of each kind, and returns how many of them left something."""
    failures = 0

    def tell(what: str, wanted: str) -> None:
        nonlocal failures
        left = work.sweep()
        if not left:
            left = work.start_two()
        failures += bool(left)
        print(f"{what} before {wanted}: " + (f"LEFT {left}" if left else "nothing left"), flush=True)

    passed = work.start("-")
    for wanted in choose([*BOOTING, *passed[: passed.index(moments.TEMPLATE_MADE) + 1]]):
        work.forget_templates()
        work.start(wanted)
        tell("making", wanted)
    for wanted in choose(work.start("-")):
        work.start(wanted)
        tell("starting", wanted)
    work.restore_images()  # what killed starts have left in the template would be moments of this pruning alone
    pruned = work.prune("-")
    for wanted in choose(pruned):
        work.restore_images()
        work.prune(wanted)
        left = work.sweep() or (work.start_two() if work.has_image() else [])
        failures += bool(left)
        print(f"pruning before {wanted}: " + (f"LEFT {left}" if left else "nothing left"), flush=True)
    # Without a kill after each delay, and with a kill at each moment, after one of them.
    for wanted, delay_seconds in [
        *(("-", delay_seconds) for delay_seconds in DELAYS),
        *zip(choose(pruned), itertools.cycle(DELAYS), strict=False),
    ]:
        work.restore_images()
        left = work.prune_beside_start(wanted, delay_seconds)
        left += work.sweep() or (work.start_two() if work.has_image() else [])
        failures += bool(left)
        what = f"pruning before {wanted}, and starting {delay_seconds:g} s after it begins"
        print(f"{what}: " + (f"LEFT {left}" if left else "nothing left"), flush=True)
    return failures


def main() -> int:
    """Works in a temporary home."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    source = random.Random(options.seed)

    def choose(passed: list[str]) -> list[str]:
        return passed if options.points is None else source.sample(passed, min(options.points, len(passed)))

    with tempfile.TemporaryDirectory(prefix="provisioner-soak-") as name:
        failures = campaign(TemplateWork(Home(Path(name) / "home")), choose)
    print("LEFTOVERS" if failures else "all clean")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
