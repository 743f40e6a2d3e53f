"""Tests each layer that ends local machines after their time to live, whatever root in them and the controller do."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest

from provisioner.base.clock import now
from provisioner.base.models import Environment, Role
from provisioner.clouds.guest_files import GUEST
from provisioner.clouds.local import orphans
from provisioner.environment import lifecycle, sweep
from provisioner.family.loader import load_family
from provisioner.machines.connect import connect
from provisioner.session import Session
from tests.command_line import ROOT
from tests.local.conftest import Lab

pytestmark = pytest.mark.vm


@pytest.fixture
def session(lab_session: Session) -> Session:
    return lab_session


@pytest.fixture
def environment(session: Session) -> Iterator[Environment]:
    """One machine."""
    up = lifecycle.up(session, load_family(ROOT / "tests" / "contract" / "families" / "echo"), "main")
    yield up
    if session.environments.directory(up.id).exists():
        lifecycle.destroy(session, up)


def as_root(session: Session, environment: Environment, role: Role, script: str) -> str:
    with connect(session, environment, role) as connection:
        done = connection.run(["sh", "-c", script])
    assert done.exit_code == 0, done.stderr.decode()
    return done.stdout.decode().strip()


def seconds_to_power_off(session: Session, environment: Environment, role: Role) -> float:
    """Returns the seconds until the timer inside a machine ends it."""
    show = "systemctl show provisioner-ttl.timer --property=NextElapseUSecMonotonic --value; cat /proc/uptime"
    monotonic, uptime = as_root(session, environment, role, show).splitlines()
    units = {"d": 86400, "h": 3600, "min": 60, "s": 1, "ms": 0.001, "us": 0.000001}
    total = 0.0
    for part in monotonic.split():
        number = part.rstrip("abcdefghijklmnopqrstuvwxyz")
        total += float(number) * units[part.removeprefix(number)]
    return total - float(uptime.split()[0])


def processes(session: Session, environment: Environment) -> dict[int, str]:
    """Returns our processes that work for an environment."""
    things = [
        thing
        for orphan in orphans.survey(session.home)
        if orphan.environment == environment.id
        for thing in orphan.resources
    ]
    return {int(thing.split()[1]): thing for thing in things if thing.startswith("process ")}


def wait(seconds: float, until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < deadline
        time.sleep(0.5)


@pytest.mark.campaign
def test_every_layer_moves_when_an_environment_is_extended(lab: Lab) -> None:
    session, environment = lab.session, lab.environment
    assert timedelta(hours=3, minutes=55) < environment.expires_at - environment.created_at <= timedelta(hours=4)
    for role in environment.machines:
        left = seconds_to_power_off(session, environment, role)
        assert abs(left - (environment.expires_at - now()).total_seconds()) < 30
    extended = lifecycle.extend(session, environment, timedelta(hours=2))
    assert extended.expires_at == environment.expires_at + timedelta(hours=2)
    assert session.environments.find(environment.id).expires_at == extended.expires_at
    for role in environment.machines:
        left = seconds_to_power_off(session, environment, role)
        assert abs(left - (extended.expires_at - now()).total_seconds()) < 30
        limit = session.environments.directory(environment.id) / role / "expires_at"
        assert float(limit.read_text()) == extended.expires_at.timestamp()
    [entry] = [entry for entry in session.ledger.entries(unsettled=True) if entry.environment == environment.id]
    assert entry.expires_at == extended.expires_at
    # Each machine has a watchdog in its own session.
    watchdogs = [pid for pid, what in processes(session, environment).items() if "watchdog" in what]
    assert len(watchdogs) == 2
    assert all(os.getsid(pid) == pid for pid in watchdogs)


# tests/contract tests that the watchdog ends a machine whose timer was stopped.
def test_a_machine_whose_watchdog_has_gone_is_ended_by_its_timer(session: Session, environment: Environment) -> None:
    soon = session.environments.update(environment, expires_at=now() + timedelta(seconds=25))
    for pid, what in processes(session, environment).items():
        if "watchdog" in what:
            os.kill(pid, signal.SIGKILL)
    session.cloud.move_ttl(soon)
    program = (GUEST / "ttl.sh").read_text()
    with connect(session, soon, "primary") as connection:
        connection.run(["sh", "-c", program, "ttl", str(int(soon.expires_at.timestamp())), "move"])
    assert session.cloud.alive(soon, "primary")
    wait(90, lambda: not session.cloud.alive(soon, "primary"))
    assert now() >= soon.expires_at
    wait(10, lambda: not processes(session, soon))
    # A sweep finds and removes its remains.
    orphans = sweep.sweep(session, lambda _: session, None)
    assert [(each.environment, each.problem) for each in orphans if each.environment == soon.id] == [(soon.id, "")]
    assert not session.environments.directory(soon.id).exists()
    assert soon.id not in {each.environment for each in session.ledger.entries(unsettled=True)}


def test_a_sweep_finds_what_lies_here_without_a_record(session: Session, created: Environment) -> None:
    half_built = session.home.images / ".building-family-nobody-0000"
    half_built.mkdir()
    stack = session.home.stacks / "nobodys"
    stack.mkdir()
    before = processes(session, created)
    assert before
    assert created.id not in {each.environment for each in sweep.find(session, None, timedelta(0))}
    # Its command has ended and its record was removed by hand, but the machines still run.
    session.leases.release(created.id)
    (session.environments.directory(created.id) / "environment.json").unlink()
    orphans = sweep.sweep(session, lambda _: session, None)
    assert created.id in {each.environment for each in orphans}
    assert all(each.problem == "" for each in orphans)
    assert processes(session, created) == {}
    assert not session.environments.directory(created.id).exists()
    assert not half_built.exists()
    assert not stack.exists()
    assert not (session.home.stacks / created.stack).exists()
    assert created.id not in {each.environment for each in session.ledger.entries(unsettled=True)}
