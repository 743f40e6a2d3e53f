"""Tests building images in real machines, and builds that fail."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from provisioner.base.errors import ImageBuildError
from provisioner.environment import lifecycle
from provisioner.family.loader import TaskFamily, load_family
from provisioner.images import build
from provisioner.machines.connect import connect
from provisioner.session import Session
from tests.command_line import CLI, variables

pytestmark = pytest.mark.vm
TOKEN = "tok-77c1e0b2-left-behind"

FAMILY = """
import os, pathlib
class TaskFamily:
    standard_version = "0.5.0"
    @staticmethod
    def get_tasks(): return {{"main": {{}}}}
    @staticmethod
    def get_instructions(t): return ""
    @staticmethod
    def install():
        {install}
    @staticmethod
    def score(t, submission): return 1.0
"""


def family(directory: Path, name: str, install: str) -> TaskFamily:
    path = directory / name
    path.mkdir()
    (path / f"{name}.py").write_text(FAMILY.format(install=install))
    return load_family(path)


@pytest.fixture
def session(open_session: Callable[[Mapping[str, str]], Session]) -> Session:
    return open_session({"BROKEN_TOKEN": TOKEN})


def assert_nothing_left(session: Session, name: str) -> None:
    assert [environment.id for environment in session.environments.all() if environment.family == name] == []
    assert [path.name for path in session.home.images.iterdir() if name in path.name] == []


def test_a_failed_install_shows_its_output_and_keeps_its_log(session: Session, tmp_path: Path) -> None:
    broken = family(tmp_path, "broken", 'print("so far so good"); raise RuntimeError(os.environ["BROKEN_TOKEN"])')
    with pytest.raises(ImageBuildError, match=r"RuntimeError: \[redacted:BROKEN_TOKEN\]") as raised:
        build.family_image(session, broken)
    assert "so far so good" in (raised.value.details or "")
    assert TOKEN not in (raised.value.details or "")
    builder = (raised.value.hint or "").split()[2]
    assert "so far so good" in (session.environments.logs(builder) / "install.log").read_text()
    assert_nothing_left(session, "broken")


def test_a_secret_that_stays_in_the_image_fails_the_build(session: Session, tmp_path: Path) -> None:
    leaky = family(tmp_path, "leaky", 'pathlib.Path("/opt/kept").write_text("x" + os.environ["BROKEN_TOKEN"])')
    with pytest.raises(ImageBuildError, match=r"secrets in the image: .*/opt/kept.*BROKEN_TOKEN"):
        build.family_image(session, leaky)
    assert_nothing_left(session, "leaky")


def test_two_controllers_that_want_one_image_build_it_once(session: Session, tmp_path: Path) -> None:
    shared = family(tmp_path, "wanted", f"print({os.getpid()})")
    argv = [*CLI, "image", "build", str(shared.directory)]
    builds = [subprocess.Popen(argv, env=variables(session.home), stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=300)[1] for process in builds]
    assert [process.returncode for process in builds] == [0, 0], said
    assert sum("Building the image of wanted" in text for text in said) == 1
    assert sum("Waiting for another provisioner" in text for text in said) == 1
    assert [image.family for image in session.images.all()].count("wanted") == 1
    for image in session.images.all():
        if image.family == "wanted":
            shutil.rmtree(session.images.path(image.name))
    assert_nothing_left(session, "wanted")


def test_every_task_boots_on_the_largest_tasks_disk(session: Session) -> None:
    large_family = load_family(Path(__file__).parent / "families" / "disks")
    environment = lifecycle.up(session, large_family, "small")
    try:
        with connect(session, environment, "primary") as connection:
            done = connection.run(["df", "--output=size", "-B1G", "/"])
        assert int(done.stdout.split()[-1]) >= 22
    finally:
        lifecycle.destroy(session, environment)
