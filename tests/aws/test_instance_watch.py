"""Tests that many environments look at EC2 together, and that neither throttling nor a late answer ends one."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from moto.ec2.models import ec2_backends

from provisioner.base.models import Endpoint, Environment
from provisioner.clouds.aws import cleanup, instance_watch
from provisioner.clouds.aws.cloud import AwsCloud
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
def running(api: FaultyApi, account: Account, session: Session) -> Iterator[list[Environment]]:
    """Environments whose machines have run for a while."""
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
    api.new.reset()
    yield records
    account.client().terminate_instances(InstanceIds=ids)


def looks(api: FaultyApi) -> int:
    return len([request for request in api.requests if request["Action"] == "DescribeInstances"])


def test_all_environments_of_a_region_share_their_looks(
    api: FaultyApi, session: Session, running: list[Environment]
) -> None:
    api.requests.clear()
    with ThreadPoolExecutor(ENVIRONMENTS) as pool:
        answers = pool.map(lambda one: [session.cloud.alive(one, role) for role in one.machines], running)
        assert list(answers) == [[True, True]] * ENVIRONMENTS
    assert 0 < looks(api) < ENVIRONMENTS
    assert api.throttle.refused == []


def test_a_look_reads_all_pages_of_its_answer(
    api: FaultyApi, account: Account, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instance_watch, "PAGE", 5)
    ec2 = account.client()
    ids = [ec2.run_instances(ImageId=AMI, MinCount=1, MaxCount=1)["Instances"][0]["InstanceId"] for _ in range(7)]
    api.new.reset()
    api.requests.clear()
    assert isinstance(session.cloud, AwsCloud)
    watch = instance_watch.Watch(REGION)
    rows = watch.rows(session.cloud.account.api, ids)
    asked = looks(api)
    ec2.terminate_instances(InstanceIds=ids)
    assert sorted(row["InstanceId"] for row in rows) == sorted(ids)
    assert asked == 2


def test_booting_environments_share_the_rate_for_consoles(
    api: FaultyApi, session: Session, running: list[Environment]
) -> None:
    api.throttle.reset()
    with ThreadPoolExecutor(ENVIRONMENTS) as pool:
        for _ in range(10):
            assert list(pool.map(lambda one: session.cloud.host_key(one, "primary"), running)) == [None] * ENVIRONMENTS
    assert api.throttle.refused == []
    assert api.throttle.taken[REGION, "GetConsoleOutput"] > ENVIRONMENTS


def test_environments_that_end_together_share_their_looks(
    api: FaultyApi, session: Session, running: list[Environment]
) -> None:
    assert isinstance(session.cloud, AwsCloud)
    found = session.cloud.account.api
    machines = [
        ec2_backends[ACCOUNT][REGION].get_instance(str(endpoint.instance_id))
        for environment in running
        for endpoint in environment.endpoints.values()
        if endpoint.instance_id
    ]
    for machine in machines:  # as EC2 has them for minutes
        machine._state.name, machine._state.code = "shutting-down", 32

    def end() -> None:
        while looks(api) <= ENVIRONMENTS:  # until a caller waits
            time.sleep(0.1)
        time.sleep(4)
        for machine in machines:
            machine._state.name, machine._state.code = "terminated", 48

    api.requests.clear()
    ending = threading.Thread(target=end)
    ending.start()
    with ThreadPoolExecutor(ENVIRONMENTS) as pool:
        for _ in pool.map(lambda each: cleanup.remove(found, REGION, each.id), running):
            pass
    ending.join()
    assert all(machine._state.name == "terminated" for machine in machines)
    # Each looks for its own machines once, by its tag. From then on they look together.
    assert ENVIRONMENTS < looks(api) < 2 * ENVIRONMENTS


@pytest.mark.parametrize("action", ["DescribeInstances", "TerminateInstances", "DescribeVolumes"])
def test_an_environment_is_removed_although_aws_throttles(
    api: FaultyApi, account: Account, session: Session, running: list[Environment], action: str
) -> None:
    assert isinstance(session.cloud, AwsCloud)
    # More often than boto3 repeats a request.
    fault = api.inject(Fault(action, "RequestLimitExceeded", status="503 Service Unavailable", times=6))
    cleanup.remove(session.cloud.account.api, REGION, running[0].id)
    assert len(fault.hits) == 6
    ids = [endpoint.instance_id for endpoint in running[0].endpoints.values()]
    [group] = [g["Instances"] for g in account.client().describe_instances(InstanceIds=ids)["Reservations"]]
    assert {instance["State"]["Name"] for instance in group} == {"terminated"}


@pytest.mark.parametrize(("kind", "waits"), [("t3.small", False), ("g4dn.xlarge", True)])
def test_a_machine_with_a_gpu_has_longer_to_end(
    api: FaultyApi, account: Account, session: Session, monkeypatch: pytest.MonkeyPatch, kind: str, waits: bool
) -> None:
    monkeypatch.setattr(cleanup, "GONE_SECONDS", 2)
    record = launched(account, session, kind)
    api.new.reset()
    api.modes.lingers = True
    ending = threading.Timer(6, api.modes.end_lingering)
    ending.start()
    session.cloud.remove(record)
    assert (state_of(account, record) == "terminated") == waits
    ending.join()


def launched(account: Account, session: Session, instance_type: str = "t3.small") -> Environment:
    """Launches an environment's only machine; EC2 does not show it for some seconds."""
    record = account.record(session, REGION)
    tags = [{"Key": "provisioner:environment", "Value": record.id}, {"Key": "provisioner:owner", "Value": "me"}]
    [instance] = account.client().run_instances(
        ImageId=AMI,
        InstanceType=instance_type,
        MinCount=1,
        MaxCount=1,
        TagSpecifications=[{"ResourceType": "instance", "Tags": tags}],
    )["Instances"]
    endpoint = Endpoint(host="h", port=22, instance_id=instance["InstanceId"])
    return record.model_copy(update={"endpoints": {"primary": endpoint}})


def state_of(account: Account, record: Environment) -> str:
    [group] = account.client().describe_instances(InstanceIds=record.instance_ids)["Reservations"]
    return str(group["Instances"][0]["State"]["Name"])


def test_a_machine_of_the_record_that_is_not_shown_yet_remains(account: Account) -> None:
    session = account.session()
    record = launched(account, session)
    assert session.cloud.remaining(record) == [f"instance {record.instance_ids[0]} (running)"]
    account.client().terminate_instances(InstanceIds=record.instance_ids)
    assert session.cloud.remaining(record) == []


def test_a_recorded_machine_that_is_not_shown_yet_is_removed(account: Account) -> None:
    session = account.session()
    record = launched(account, session)
    session.cloud.remove(record)
    assert state_of(account, record) == "terminated"


def test_new_resources_are_looked_for_until_visible(account: Account) -> None:
    session = account.session()
    record = launched(account, session)
    assert isinstance(session.cloud, AwsCloud)
    cleanup.remove(session.cloud.account.api, REGION, record.id, just_created=True)
    assert state_of(account, record) == "terminated"


def test_a_machine_is_terminated_as_soon_as_it_can_be(api: FaultyApi, account: Account, session: Session) -> None:
    record = launched(account, session)
    api.new.reset()
    fault = api.inject(Fault("TerminateInstances", "InvalidInstanceID.NotFound", times=2))
    session.cloud.remove(record)
    assert len(fault.hits) == 2
    assert state_of(account, record) == "terminated"


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
