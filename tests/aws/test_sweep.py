"""Tests the sweep on AWS, with other users' instances, environments without records, and other controllers' ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from datetime import timedelta
from typing import Any

import pytest
from moto.scheduler.models import scheduler_backends

from provisioner.base.clock import MAX_TTL, now
from provisioner.base.models import Environment
from provisioner.clouds.aws import cleanup, schedules
from provisioner.clouds.aws.api import Api
from provisioner.environment import sweep
from provisioner.machines.create import create_machines, create_shared_network
from provisioner.session import Session
from tests.aws.account import AMI, NOTHING, REGION, Account, MakeEnvironment
from tests.aws.proxy import FaultyApi
from tests.aws.rights.requests import ACCOUNT
from tests.soak.processes import descendants
from tests.waiting import until


def swept(session: Session, **options: Any) -> list[str]:
    orphans = sweep.sweep(session, lambda _: session, [REGION], **options)
    assert [orphan.problem for orphan in orphans if orphan.problem] == []
    return [orphan.environment for orphan in orphans]


def abandon(session: Session, environment: Environment) -> None:
    """Releases the lease, as if the process that looks after the environment had been killed."""
    session.leases.release(environment.id)


def start_strangers(account: Account, count: int, tags: dict[str, str]) -> list[str]:
    """Starts instances that are not ours."""
    ec2 = account.client()
    tag_list = [{"Key": key, "Value": value} for key, value in tags.items()]
    specifications = [{"ResourceType": "instance", "Tags": tag_list}] if tag_list else []
    started = ec2.run_instances(
        ImageId=AMI, MinCount=count, MaxCount=count, InstanceType="t3.nano", TagSpecifications=specifications
    )
    return [instance["InstanceId"] for instance in started["Instances"]]


def running(account: Account) -> set[str]:
    pages = account.client().get_paginator("describe_instances").paginate()
    instances = [i for page in pages for r in page["Reservations"] for i in r["Instances"]]
    return {i["InstanceId"] for i in instances if i["State"]["Name"] == "running"}


def test_none_of_fifteen_hundred_strangers_is_touched(
    api: FaultyApi, account: Account, environment: MakeEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = account.session()
    theirs = start_strangers(account, 750, {})
    theirs += start_strangers(account, 700, {"Name": "provisioner", "owner": "provisioner"})
    theirs += start_strangers(account, 50, {"provisioner:environments": "no", "my:provisioner:environment": "no"})
    # Among them is one of ours, an environment without a record, on the last pages.
    [record] = create_machines(session, [environment(session, aux=False)])
    abandon(session, record)
    session.environments.forget(record.id)
    orphans = [f"tests-orphan-{number}" for number in range(6)]
    tags = {"provisioner:home": session.home.identity, "provisioner:owner": "me"}
    ours = {start_strangers(account, 1, {**tags, "provisioner:environment": name})[0] for name in orphans}
    ours.add(record.endpoints["primary"].instance_id or "")
    # EC2 answers in pages. They are small here, so that there are several.
    monkeypatch.setattr(cleanup, "PAGE", 5)
    assert running(account) == set(theirs) | ours
    assert swept(session, dry_run=True) == sorted([record.id, *orphans])
    assert any(request["Action"] == "DescribeInstances" and "NextToken" in request for request in api.requests)
    assert running(account) == set(theirs) | ours
    # From another region, only a sweep of all regions finds it.
    afar = account.session(regions=("eu-west-1",))
    assert sweep.find(afar, ["eu-west-1"], timedelta(0)) == []
    assert [(orphan.environment, orphan.region) for orphan in sweep.find(afar, None, timedelta(0))] == [
        (name, REGION) for name in sorted([record.id, *orphans])
    ]
    assert sorted(swept(session)) == sorted([record.id, *orphans])
    assert running(account) == set(theirs)
    assert session.ledger.entries(unsettled=True) == []
    for first in range(0, len(theirs), 500):
        account.client().terminate_instances(InstanceIds=theirs[first : first + 500])
    assert account.everything() == NOTHING


def test_a_sweep_removes_orphans_only(account: Account, environment: MakeEnvironment) -> None:
    session, other = account.session(), account.session("other")
    records = create_machines(session, [environment(session, stack="four", aux=False) for _ in range(4)])
    tended, idle, orphan, past = records
    idle = session.environments.update(idle, status="ready")
    abandon(session, idle)
    abandon(session, orphan)
    past = session.environments.update(past, status="ready", expires_at=now() - timedelta(minutes=1))
    abandon(session, past)
    # Another controller sees only tags, and no time to live has ended long enough ago.
    assert swept(other) == []
    assert swept(session, older_than=timedelta(hours=1)) == []
    assert sorted(swept(session)) == sorted([orphan.id, past.id])
    left = {tag["Value"] for i in instances(account) for tag in i["Tags"] if tag["Key"] == "provisioner:environment"}
    assert left == {tended.id, idle.id}

    # Long past its time to live, another controller removes it, unless its own controller still renews the lease.
    session.cloud.move_ttl(session.environments.update(tended, expires_at=now() - timedelta(hours=1)))
    session.cloud.renew_lease(tended)
    session.cloud.move_ttl(session.environments.update(idle, expires_at=now() - timedelta(hours=1)))
    assert swept(other) == [idle.id]
    abandon(session, tended)
    assert sorted(swept(session)) == sorted([tended.id, idle.id])
    assert account.everything() == NOTHING
    assert session.ledger.entries(unsettled=True) == []


def test_an_old_schedule_alone_is_removed(account: Account) -> None:
    session, other = account.session(), account.session("other")
    schedules.require_group(Api(None, REGION), REGION)
    name = "tests-main-abcdef"
    account.client("scheduler").create_schedule(
        Name=f"{name}.primary", GroupName="provisioner", ScheduleExpression="at(2026-01-01T00:00:00)",
        FlexibleTimeWindow={"Mode": "OFF"}, Target={"Arn": "arn:aws:scheduler:::aws-sdk:ec2:terminateInstances",
        "RoleArn": "arn:aws:iam::123456789012:role/provisioner-scheduler", "Input": "{}"},
    )  # fmt: skip
    assert swept(session) == swept(other) == []
    schedule = scheduler_backends[ACCOUNT][REGION].schedule_groups["provisioner"].schedules[f"{name}.primary"]
    vars(schedule)["creation_date"] = (now() - MAX_TTL).timestamp() - 601
    assert swept(other) == [name]
    assert account.everything() == NOTHING


def instances(account: Account) -> list[dict[str, Any]]:
    described = [i for r in account.client().describe_instances()["Reservations"] for i in r["Instances"]]
    return [i for i in described if i["State"]["Name"] == "running"]


CREATE = """
import sys
from pathlib import Path
from provisioner.machines.create import create_machines
from tests.aws.account import Account, make_environment
session = Account(Path(sys.argv[1])).session()
create_machines(session, [make_environment(session, aux=False)])
"""


@pytest.mark.xdist_group("account")
@pytest.mark.parametrize("victim", [pytest.param("controller", marks=pytest.mark.story), "terraform"])
def test_killed_during_an_apply_nothing_is_left_after_a_sweep(
    account: Account, environment: MakeEnvironment, victim: str
) -> None:
    session = account.session()
    create_shared_network(session, account.record(session, REGION))
    directory = session.home.root.parent
    controller = subprocess.Popen([sys.executable, "-c", CREATE, str(directory)], start_new_session=True)
    until(lambda: instances(account), lambda: controller.poll() is None)
    if victim == "terraform":
        terraforms = descendants(controller.pid, "terraform")
        assert terraforms
        for pid in terraforms:
            os.kill(pid, signal.SIGKILL)
    else:
        os.kill(controller.pid, signal.SIGKILL)
    controller.wait()
    # Its state is almost empty: plain Terraform would destroy nothing and exit with code 0.
    assert instances(account)
    assert len(swept(session)) == 1
    assert account.everything() == NOTHING
    assert session.environments.all() == []
    assert session.ledger.entries(unsettled=True) == []
