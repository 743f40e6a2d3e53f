"""Tests samples of the programs here: after a kill of a run, an eval or a pruning, clearing away leaves nothing."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from provisioner.base.clock import now
from provisioner.store.home import TEMPLATES, Home
from provisioner.store.images import Image, ImageStore
from tests.command_line import ROOT, variables
from tests.soak import eval_kills, moments


@pytest.mark.vm
@pytest.mark.timeout(5400)
@pytest.mark.parametrize(("cloud", "count"), [("local", 1), ("aws", 2)])
def test_nothing_is_left_wherever_it_was_killed(cloud: str, count: int) -> None:
    # Each seed gives other moments; the whole campaign covers many.
    argv = [sys.executable, "-m", "tests.soak.kill_points", "--cloud", cloud, "--points", str(count), "--workers", "1"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("nothing left") == count
    assert "all clean" in done.stdout


@pytest.mark.vm
@pytest.mark.timeout(5400)
def test_nothing_is_left_of_a_killed_eval() -> None:
    chosen = random.sample(eval_kills.MOMENTS, 2)  # tests.soak.eval_kills has all
    argv = [sys.executable, "-m", "tests.soak.eval_kills", *chosen, "--seed", str(random.randrange(1000))]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": hit, ") == len(chosen)


def image_with_template(home: Home) -> Path:
    """Writes an image that has a template, as far as pruning sees it, and returns its directory."""
    store, directory = ImageStore(home), home.images / "new"
    template = directory / TEMPLATES / "template"
    template.mkdir(parents=True)
    for name in ("memory", "state", "disk.qcow2"):
        (template / name).write_text(name)
    store.finish(Image(name="base-primary-1", kind="base", created_at=now()), directory)
    return store.path("base-primary-1")


def test_a_killed_pruning_leaves_all_or_nothing_of_an_image(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.make()

    def prune(wanted: str) -> subprocess.CompletedProcess[str]:
        return moments.run(wanted, str(ROOT / "cli.py"), "image", "prune", "--all", env=variables(home), cwd=ROOT)

    image = image_with_template(home)
    whole = sorted(path.relative_to(image) for path in image.rglob("*"))
    passed = moments.passed(prune("-").stderr)
    assert len(passed) > 3
    for wanted in random.sample(passed, 3):  # tests.soak.template_kills has all
        image = image if image.exists() else image_with_template(home)
        assert prune(wanted).returncode == moments.KILLED, wanted
        assert not image.exists() or sorted(path.relative_to(image) for path in image.rglob("*")) == whole, wanted
        ImageStore(home).remove_unfinished()
        assert [path for path in home.images.iterdir() if path != image] == [], wanted
