"""Root in a machine fills its disk, and with it the disk of the host: ledger, records and other runs would fail.

A launch counts what all machines are guaranteed, and is refused before anything is created. While machines run, the one
that has taken most beyond its share ends before the host's disk is full, and the others do not. A large disk that an
ended machine left changes nothing about that. If the host's disk gets full in spite of all, QEMU pauses machines: that
is not their agents' doing, and no way to a fresh attempt for the one that fills it.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from provisioner.base.config import Settings
from provisioner.base.errors import CapacityError
from provisioner.base.models import Environment
from provisioner.clouds.cloud import TerminationReason
from provisioner.clouds.local import host
from provisioner.clouds.local.cloud import LocalCloud
from provisioner.clouds.local.vm import disk, qemu
from provisioner.environment.outcomes import attribute_loss
from provisioner.store.home import Home
from tests.unit.fakes.qmp import serving
from tests.unit.fakes.world import environment
from tests.waiting import BOUND_SECONDS, until

MIB = 1 << 20
# Holds the lock on the pidfile, as QEMU does.
QEMU = """
import fcntl, os, signal
os.mkdir("run")
pidfile = open("run/qemu.pid", "w")
fcntl.lockf(pidfile, fcntl.LOCK_EX)
print("up", flush=True)
signal.pause()
"""
# The host's disk is nearly full for as long as the flooder's disk exists. Each look at it is noted.
WATCHDOG = """
import sys
from pathlib import Path
from provisioner.clouds.local import watchdog
from provisioner.clouds.local.vm import disk
flooder = Path(sys.argv[1])
def free(_):
    with Path("looks").open("a") as looks:
        looks.write("x")
    return (1 if flooder.exists() else 10) << 30
disk._free = free
watchdog.main()
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    """A home on a host with 10 GiB of free disk."""
    monkeypatch.setattr(host, "kvm_works", lambda *_: False)
    monkeypatch.setattr(disk, "_free", lambda _: 10 << 30)
    home = Home(tmp_path / "home")
    home.make()
    return home


def cloud(home: Home, overcommit: float = 8) -> LocalCloud:
    return LocalCloud(home, Settings(disk_overcommit=overcommit))


def prepared(cloud: LocalCloud, *new: Environment) -> list[str]:
    """Prepares environments, all at once; returns those that were not refused."""

    def prepare(one: Environment) -> str:
        try:
            cloud.prepare(one, {role: {} for role in one.machines})
        except CapacityError:
            return ""
        return one.id

    with ThreadPoolExecutor(len(new)) as pool:
        return [name for name in pool.map(prepare, new) if name]


def test_a_launch_that_does_not_fit_is_refused_first(home: Home) -> None:
    with pytest.raises(CapacityError) as refused:
        cloud(home, overcommit=1).prepare(environment("large"), {"primary": {}})
    assert refused.value.message == (
        "The disk of this host has no room for these machines: they need 16.0 GiB, and 8.0 GiB are available. Of 10.0 "
        "GiB free, 0.0 GiB are guaranteed to other machines and 2.0 GiB are kept for provisioner itself."
    )
    assert "disk_overcommit" in (refused.value.hint or "")
    assert refused.value.exit_code == 5
    assert list(home.environments.iterdir()) == []


def test_launches_at_the_same_time_do_not_share_the_same_room(home: Home) -> None:
    # 8 GiB for machines with 2 GiB guaranteed each, two of them in the pair.
    new = [environment(f"env-{number}") for number in range(8)] + [environment("pair", roles=("primary", "aux"))]
    fitting = prepared(cloud(home), *new)
    assert sum(len(env.machines) for env in new if env.id in fitting) == 4


def test_what_a_machine_has_taken_already_is_not_counted_twice(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(prepared(cloud(home), *[environment(f"env-{number}") for number in range(4)])) == 4
    # They take their 2 GiB each: less is free, and nothing more is due to them.
    monkeypatch.setattr(disk, "_used", lambda _: 2 << 30)
    assert prepared(cloud(home), environment("next")) == ["next"]
    monkeypatch.setattr(disk, "_free", lambda _: 3 << 30)
    assert prepared(cloud(home), environment("last")) == []


def test_the_figures_are_shown(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared(cloud(home), environment())
    assert cloud(home).notes()[-2] == (
        "Disk: 10.0 GiB free, 6.0 GiB available to new machines: 3 more fit (16 GiB each, 2.0 GiB guaranteed)."
    )
    sizes = {role: machine.size for role, machine in environment().machines.items()}
    assert cloud(home).room(sizes).startswith("2.0 GiB of the host's disk guaranteed, of 6.0 GiB available")
    monkeypatch.setattr(disk, "_free", lambda _: 3 << 30)
    assert "0 more fit" in cloud(home).problems()[-1][0]


@pytest.fixture
def start(home: Home) -> Iterator[Callable[[str, int], subprocess.Popen[bytes]]]:
    """Starts a stand-in for QEMU, with a disk of so many MiB, of which it was sure of one, and its watchdog."""
    processes = []
    flooder = home.environments / "flooder" / "primary" / disk.OVERLAY

    def start_one(name: str, used_mib: int) -> subprocess.Popen[bytes]:
        directory = home.environments / name / "primary"
        directory.mkdir(parents=True)
        (directory / disk.SHARE).write_text(str(MIB))
        (directory / "expires_at").write_text(str(time.time() + 3600))
        process = subprocess.Popen([sys.executable, "-c", QEMU], cwd=directory, stdout=subprocess.PIPE)
        processes.append(process)
        assert process.stdout
        assert process.stdout.readline() == b"up\n"
        # It has its whole disk at once, and only now: until then, the machine that is above its share would have to go.
        whole = directory / "whole"
        whole.write_bytes(b"x" * (used_mib * MIB))
        whole.rename(directory / disk.OVERLAY)
        root = str(Path(__file__).parents[2])
        argv = [sys.executable, "-c", WATCHDOG, str(flooder)]
        processes.append(subprocess.Popen(argv, cwd=directory, env={"PYTHONPATH": root}))
        return process

    yield start_one
    for process in processes:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


def test_an_ended_machines_large_disk_keeps_no_other_alive(
    home: Home, start: Callable[[str, int], subprocess.Popen[bytes]]
) -> None:
    ended = home.environments / "ended" / "primary"
    (ended / qemu.RUN).mkdir(parents=True)
    (ended / disk.SHARE).write_text(str(MIB))
    (ended / disk.OVERLAY).write_bytes(b"x" * (20 * MIB))
    (ended / qemu.PIDFILE).write_text("1\n")
    assert start("flooder", 9).wait(BOUND_SECONDS) != 0
    assert (ended / disk.OVERLAY).exists()  # its environment may still want it


def test_the_machine_that_fills_the_disk_ends_alone(
    home: Home, start: Callable[[str, int], subprocess.Popen[bytes]]
) -> None:
    modest, above = start("modest", 0), start("above", 3)
    flooder = start("flooder", 9)
    assert flooder.wait(BOUND_SECONDS) != 0
    local, gone = cloud(home), environment("flooder")
    until(lambda: not (home.environments / "flooder" / "primary" / disk.OVERLAY).exists())
    ended = local.termination_reason(gone, "primary")
    assert "the host's disk was nearly full" in ended.message
    assert ended.from_within
    assert ended.message in local.console(gone, "primary")
    for name in ("modest", "above"):
        looks = home.environments / name / "primary" / "looks"
        until(looks.exists)
        before = looks.stat().st_size
        until(lambda looks=looks, before=before: looks.stat().st_size > before + 2)  # type: ignore[misc]
    assert (modest.poll(), above.poll()) == (None, None)
    assert not local.termination_reason(environment("above"), "primary").from_within


@pytest.fixture
def paused(home: Home, monkeypatch: pytest.MonkeyPatch) -> Callable[[Environment], str]:
    """Tells what a cloud says of a primary machine that runs, but that QEMU has paused for want of disk."""

    def impairment(env: Environment) -> str:
        with serving(home.environments / env.id / "primary", {"query-status": {"status": "io-error"}}):
            return cloud(home).impairment(env, "primary")

    monkeypatch.setattr(qemu, "live_pid", lambda _: 1)
    return impairment


def test_a_machine_without_disk_through_another_is_the_hosts(
    home: Home, monkeypatch: pytest.MonkeyPatch, paused: Callable[[Environment], str]
) -> None:
    victim, flooder = environment("victim"), environment("flooder")
    prepared(cloud(home), victim, flooder)
    monkeypatch.setattr(disk, "_used", lambda path: (9 << 30) if "flooder" in path.parts else 0)
    monkeypatch.setattr(disk, "_free", lambda _: 0)
    said = TerminationReason(paused(victim))
    assert said.message == "the host's disk is full: QEMU paused the machine"
    assert attribute_loss({"primary": said}, agent_began=True, expired=False).cause == "cloud"
    assert paused(flooder) == ""  # it is about to be ended, and to be blamed


def test_no_machine_excuses_another_of_its_own_environment(
    home: Home, monkeypatch: pytest.MonkeyPatch, paused: Callable[[Environment], str]
) -> None:
    pair = environment("pair", roles=("primary", "aux"))
    prepared(cloud(home), pair)
    monkeypatch.setattr(disk, "_used", lambda path: (9 << 30) if "aux" in path.parts else 0)
    monkeypatch.setattr(disk, "_free", lambda _: 0)
    assert paused(pair) == ""
    monkeypatch.setattr(disk, "_free", lambda _: 9 << 30)
    assert paused(pair) != ""  # another environment's disk is gone
    (home.environments / "pair" / "aux" / disk.EVICTED).write_text("it was ended")
    assert paused(pair) == ""
