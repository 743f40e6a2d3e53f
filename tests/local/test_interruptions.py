"""Tests that signals at any moment of a run leave nothing behind."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from provisioner.base.models import Status
from provisioner.store.environments import EnvironmentStore
from provisioner.store.home import Home
from tests.command_line import CLI, ROOT, provisioner, variables
from tests.homes import borrow_images
from tests.waiting import until

pytestmark = pytest.mark.vm
FAMILY = ROOT / "tests" / "contract" / "families" / "echo"
# Seconds, or the status of an environment. The apply begins after about 0.7 s; the first makes the image's template,
# which takes it twenty. Once an environment is ready it is scored and destroyed. tests.soak.kill_points has many more
# moments.
Moment = float | Status
INTERRUPTED: list[tuple[Moment, tuple[signal.Signals, ...]]] = [
    (0.3, (signal.SIGINT, signal.SIGTERM)), (2.5, (signal.SIGINT, signal.SIGTERM)), ("ready", (signal.SIGTERM,)),
]  # fmt: skip
KILLED: list[tuple[Moment, Moment]] = [(1.3, "ready")]


def start_run(home: Home) -> subprocess.Popen[bytes]:
    """Starts a controller in its own session, as at a terminal."""
    submission = home.root / "submission.txt"
    submission.write_text("1")
    argv = [*CLI, "run", str(FAMILY), "main", "--submission-file", str(submission)]
    return subprocess.Popen(
        argv, env=variables(home), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip


def wait_for(home: Home, moment: Moment, begin: float, runs: Iterable[subprocess.Popen[bytes]]) -> None:
    """Waits for a moment, while a run lives; `begin` is the work's beginning, in time.monotonic() seconds."""
    if isinstance(moment, float):
        time.sleep(max(0, begin + moment - time.monotonic()))
        return
    until(
        lambda: any(record.status == moment for record in EnvironmentStore(home).readable()),
        lambda: any(run.poll() is None for run in runs),
    )


def destroy_all(home: Home) -> None:
    done = provisioner(home, "destroy", "--all")
    assert done.returncode == 0, done.stderr


def processes_of(home: Home) -> list[str]:
    """Returns the command lines of all processes that work in the home."""
    commands = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            directory, words = (process / "cwd").readlink(), (process / "cmdline").read_bytes()
        except OSError:
            continue
        inside = str(directory).startswith((str(home.environments), str(home.stacks), str(home.snapshots)))
        if inside or f"{home.environments}/".encode() in words:
            commands.append(words.replace(b"\0", b" ").decode())
    return commands


def assert_nothing_left(home: Home) -> None:
    assert list(home.environments.iterdir()) == []
    assert [path.name for path in home.stacks.iterdir() if path.name != ".initialised"] == []
    assert processes_of(home) == []


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, test_home: Home) -> Home:
    """Returns a new home with the family's image, so that a run begins with the apply."""
    new = borrow_images(test_home, tmp_path_factory.mktemp("home"))
    built = provisioner(new, "image", "build", str(FAMILY))
    assert built.returncode == 0, built.stderr
    return new


@pytest.mark.parametrize(("moment", "signals"), INTERRUPTED)
def test_an_interrupted_run_cleans_up_by_itself(
    home: Home, moment: Moment, signals: tuple[signal.Signals, ...]
) -> None:
    runs = {number: start_run(home) for number in signals}
    wait_for(home, moment, time.monotonic(), runs.values())
    for number, process in runs.items():
        process.send_signal(number)
    for number, process in runs.items():
        # So early, Python itself is still starting and the signal ends it: nothing has been created yet.
        assert process.wait(timeout=150) in (128 + number, 0, -number)
    assert_nothing_left(home)


@pytest.mark.story
@pytest.mark.parametrize("moments", KILLED)
def test_what_killed_controllers_leave_is_destroyed(home: Home, moments: tuple[Moment, Moment]) -> None:
    runs = [start_run(home) for _ in moments]
    begin = time.monotonic()
    for moment, process in zip(moments, runs, strict=True):
        wait_for(home, moment, begin, [process])
        process.kill()
        process.wait()
    destroy_all(home)
    assert_nothing_left(home)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_base_image_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    home = Home(tmp_path / "home")
    argv, said = [*CLI, "image", "build", str(FAMILY)], tmp_path / "said"
    with (
        said.open("w") as output,
        subprocess.Popen(argv, env=variables(home), stdout=output, stderr=subprocess.STDOUT) as build,
    ):
        try:
            deadline = time.monotonic() + 180
            # After this, /dev and /proc are mounted into the tree.
            while "installing remaining packages" not in "".join(
                path.read_text() for path in home.root.glob("images/.building-*/build.log")
            ):
                assert build.poll() is None, said.read_text()
                assert time.monotonic() < deadline, said.read_text()
                time.sleep(0.1)
            build.send_signal(number)
            build.wait(timeout=60)
        finally:
            build.kill()
    deadline = time.monotonic() + 10
    while working := [line for line in command_lines() if str(home.root) in line]:
        assert time.monotonic() < deadline, working
        time.sleep(0.1)
    assert str(home.root) not in Path("/proc/self/mounts").read_text()
    pruned = provisioner(home, "image", "prune")
    assert pruned.returncode == 0, pruned.stderr
    assert list(home.images.iterdir()) == []


def command_lines() -> list[str]:
    """Returns the command lines of all processes."""
    lines = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            lines.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return lines
