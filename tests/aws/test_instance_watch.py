"""Tests that many environments look at EC2 together, and that neither throttling nor a late answer ends one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from moto.ec2.models import ec2_backends

from provisioner.clouds.aws import instance_watch
from provisioner.models import Endpoint, Environment
from provisioner.session import Session
from tests.aws.account import AMI, REGION, Account
from tests.aws.proxy import Fault, FaultyApi
from tests.aws.rights.requests import ACCOUNT

ENVIRONMENTS = 30


@pytest.fixture
def session(account: Account, monkeypatch: pytest.MonkeyPatch) -> Session:
    """A session that looks every second."""
    monkeypatch.setattr(instance_watch, "LOOK_SECONDS", 1.0)
    return account.session()


@pytest.fixture
def running(account: Account, session: Session) -> Iterator[list[Environment]]:
    """Environments whose machines run."""
    ec2 = account.client()
    started = ec2.run_instances(ImageId=AMI, MinCount=2 * ENVIRONMENTS, MaxCount=2 * ENVIRONMENTS)["Instances"]
    ids = [instance["InstanceId"] for instance in started]
    records = []
    for primary, aux in zip(ids[::2], ids[1::2], strict=True):
        record = account.record(session, REGION)
        machine = record.machines["primary"]
        endpoints = {"primary": Endpoint(host="h", port=22, instance_id=primary)}
        endpoints["aux"] = Endpoint(host="h", port=22, instance_id=aux)
        both = {"primary": machine, "aux": machine}
        records.append(record.model_copy(update={"machines": both, "endpoints": endpoints}))
        tags = [{"Key": "provisioner:environment", "Value": record.id}, {"Key": "provisioner:owner", "Value": "me"}]
        ec2.create_tags(Resources=[primary, aux], Tags=tags)
    yield records
    account.client().terminate_instances(InstanceIds=ids)


def looks(api: FaultyApi) -> int:
    return len([request for request in api.requests if request["Action"] == "DescribeInstances"])


def test_all_environments_of_a_region_share_their_looks(
    api: FaultyApi, session: Session, running: list[Environment]
) -> None:
    api.requests.clear()
    api.throttle.enabled = True
    with ThreadPoolExecutor(ENVIRONMENTS) as pool:
        answers = pool.map(lambda one: [session.cloud.alive(one, role) for role in one.machines], running)
        assert list(answers) == [[True, True]] * ENVIRONMENTS
    assert 0 < looks(api) < ENVIRONMENTS
    assert api.throttle.refused == []


def test_a_throttled_look_is_no_death(
    api: FaultyApi, account: Account, session: Session, running: list[Environment]
) -> None:
    ended, untouched = running[:2]
    assert session.cloud.alive(ended, "primary")
    api.inject(Fault("DescribeInstances", "RequestLimitExceeded", status="503 Service Unavailable"))
    account.client().terminate_instances(InstanceIds=[ended.endpoints["primary"].instance_id])
    threading.Event().wait(1.2)
    assert session.cloud.alive(ended, "primary")  # as far as is known
    assert session.cloud.alive(untouched, "primary")  # nothing is known
    api.faults.clear()
    threading.Event().wait(1.2)
    assert not session.cloud.alive(ended, "primary")
    assert session.cloud.alive(untouched, "primary")


def test_a_machine_that_one_answer_misses_is_asked_about_again(session: Session, running: list[Environment]) -> None:
    reservations = ec2_backends[ACCOUNT][REGION].reservations
    hidden = dict(reservations)
    reservations.clear()
    timer = threading.Timer(0.3, reservations.update, [hidden])
    timer.start()
    try:
        assert session.cloud.alive(running[0], "primary")
        timer.join()
        reservations.clear()
        assert not session.cloud.alive(running[1], "primary")
    finally:
        timer.join()
        reservations.update(hidden)
    threading.Event().wait(1.2)
    assert session.cloud.alive(running[1], "primary")
