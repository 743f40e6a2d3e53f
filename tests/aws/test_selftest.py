"""A sample of `aws check` on EC2 with real machines behind it; `scripts/soak aws-check` runs all of it."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from provisioner.clouds.aws.cloud import AwsCloud
from provisioner.errors import HostError
from provisioner.models import Destination
from provisioner.selftest.checks import ALL_COMBINATIONS, Combination
from provisioner.selftest.plan import steps
from provisioner.selftest.report import report
from provisioner.selftest.steps import run_steps
from provisioner.session import Session
from provisioner.store.home import Home
from tests.aws.account import Notes
from tests.aws.ec2.fixture import ec2_session

WHOLE = os.environ.get("PROVISIONER_TEST_SELFTEST", "")
# Booting a machine takes most of a minute of processor time here.
CROWD = int(WHOLE or 1)
# Nothing else boots this combination.
SAMPLE = (Combination("allowlist", aux=True, spot=True),)
SAMPLED_STEPS = ("controller and account", "images", "rights", SAMPLE[0].name, "nothing left")
pytestmark = [pytest.mark.vm, pytest.mark.xdist_group("ec2"), pytest.mark.timeout(7200 if WHOLE else 2400)]


def opened(home: Home, *, spot: bool) -> Session:
    session = ec2_session(home)
    assert isinstance(session.cloud, AwsCloud)
    cloud = AwsCloud(home, session.cloud.account.settings, spot=spot)
    return replace(session, cloud=cloud, progress=Notes())


@pytest.fixture
def destination() -> Iterator[Destination]:
    """Yields where something answers: at this host's own address, which no probe asks for."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outward:
        outward.connect(("192.0.2.1", 9))
        address = outward.getsockname()[0]
    with socket.create_server((address, 0), backlog=64) as server:
        server.settimeout(0.2)
        ended = threading.Event()

        def greet() -> None:
            while not ended.is_set():
                with contextlib.suppress(OSError):
                    connection, _ = server.accept()
                    with connection:
                        connection.sendall(b"hello\n")

        greeter = threading.Thread(target=greet)
        greeter.start()
        yield Destination(cidr=f"{address}/32", port=server.getsockname()[1])
        ended.set()
        greeter.join()


def test_all_steps_pass_on_a_strict_account(ec2_home: Home, destination: Destination) -> None:
    sessions = {spot: opened(ec2_home, spot=spot) for spot in (False, True)}
    planned = steps(sessions, destination, ALL_COMBINATIONS if WHOLE else SAMPLE, CROWD)
    if not WHOLE:
        planned = [step for step in planned if step.name in SAMPLED_STEPS]
        assert len(planned) == len(SAMPLED_STEPS)
    outcome = run_steps(planned, sessions[False].progress)
    print(report(outcome, {"region": sessions[False].cloud.region}))
    assert outcome.surprise is None, outcome.surprise.details
    assert len(outcome.results) == len(planned)
    assert sessions[False].environments.all() == []


def test_a_controller_that_is_not_ready_is_the_first_surprise(ec2_home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVISIONER_TERRAFORM", "/nowhere")
    sessions = {spot: opened(ec2_home, spot=spot) for spot in (False, True)}
    outcome = run_steps(steps(sessions, Destination(cidr="203.0.113.7/32", port=80)), sessions[False].progress)
    assert isinstance(outcome.surprise, HostError)
    assert len(outcome.results) == 1
