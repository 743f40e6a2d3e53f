"""Tests that the traffic of environments is reserved, bounded by CloudWatch's word, and counted."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal

import pytest

from provisioner.base.clock import now
from provisioner.base.errors import AgentError, HostError, MachineLostError
from provisioner.base.models import Endpoint, Environment
from provisioner.clouds.aws import traffic
from provisioner.environment import outcomes
from provisioner.machines import claims
from provisioner.machines.create import record_environment
from provisioner.machines.destroy import destroy_machines
from provisioner.session import Session
from provisioner.store.environments import new_id
from tests.aws.account import AMI, REGION, Account
from tests.aws.proxy import Fault, FaultyApi

GB = 10**9
PRICE = 90_000  # millionths of a US dollar for a GB


@pytest.fixture
def session(account: Account, monkeypatch: pytest.MonkeyPatch) -> Session:
    """A session that asks CloudWatch as often as it is asked."""
    monkeypatch.setattr(traffic, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(traffic, "_meters", {})
    return account.session()


def launched(account: Account, session: Session, *, full_internet: bool = True, since_minutes: int = 60) -> Environment:
    """Launches an environment's only machine without Terraform. An agent works in it."""
    identity, begun = new_id("tests", "main"), now() - timedelta(minutes=since_minutes)
    record = account.record(session, REGION).model_copy(
        update={
            "id": identity, "stack": identity, "full_internet": full_internet, "created_at": begun,
            "placement": {"region": REGION, "account": ""}, "agent_at": begun,
        }
    )  # fmt: skip
    record = claims.reserve(session, record)
    record_environment(session, record)
    tags = [{"Key": "provisioner:environment", "Value": record.id}, {"Key": "provisioner:owner", "Value": "me"}]
    [instance] = account.client().run_instances(
        ImageId=AMI, MinCount=1, MaxCount=1, TagSpecifications=[{"ResourceType": "instance", "Tags": tags}]
    )["Instances"]
    endpoints = {"primary": Endpoint(host="h", port=22, instance_id=instance["InstanceId"])}
    return session.environments.update(record, endpoints=endpoints, usd_per_hour=record.worst_usd_per_hour)


def entry_of(session: Session, record: Environment) -> tuple[int, int | None]:
    [entry] = session.ledger.entries(environment=record.id)
    return entry.reserved_micro_usd, entry.actual_micro_usd


def test_only_environments_with_a_way_out_reserve_traffic(api: FaultyApi, account: Account, session: Session) -> None:
    online, offline = launched(account, session), launched(account, session, full_internet=False)
    api.new.reset()
    assert [record.egress_gb for record in (online, offline)] == [Decimal(10), Decimal(0)]
    # The public address is the primary machine's in both.
    assert entry_of(session, online)[0] - entry_of(session, offline)[0] == 10 * PRICE
    destroy_machines(session, online)
    destroy_machines(session, offline)


def test_an_environment_beyond_its_bound_is_ended_and_the_agent_answers_for_it(
    api: FaultyApi, account: Account, session: Session
) -> None:
    record = launched(account, session)
    api.new.reset()
    [name] = record.instance_ids
    account.send(name, 6 * GB, minutes_ago=40)
    account.send("i-1234567890abcdef0", 900 * GB, minutes_ago=40)
    claims.bound_traffic(session, record)
    assert session.cloud.alive(record, "primary")
    account.send(name, 4.2 * GB, minutes_ago=10)
    claims.bound_traffic(session, record)
    ended = session.environments.find(record.id)
    assert ended.overrun.startswith(f"{record.id} has sent 10.2 GB, more than the 10 GB of egress_gb")
    assert "raise egress_gb in the configuration file, or PROVISIONER_EGRESS_GB" in ended.overrun
    assert account.progress.notes[-1] == ended.overrun
    assert account.everything()["instances"] == []
    with pytest.raises(AgentError, match="has sent 10"), outcomes.attributing_loss(session, record):
        raise MachineLostError("The machine does not answer.")
    destroy_machines(session, ended)


def test_a_run_is_settled_with_its_bound_until_cloudwatch_shows_what_it_sent(
    api: FaultyApi, account: Account, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = launched(account, session)
    api.new.reset()
    destroy_machines(session, record)
    machines = 1.0 * (entry_of(session, record)[1] or 0) - 10 * PRICE
    assert machines > 0
    account.send(record.instance_ids[0], 30 * GB, minutes_ago=5)
    claims.count_traffic(session)  # more than the bound counts at once
    assert entry_of(session, record)[1] == machines + 30 * PRICE
    claims.count_traffic(session)
    assert entry_of(session, record)[1] == machines + 30 * PRICE
    monkeypatch.setattr(claims, "SHOWN", timedelta(0))
    other = launched(account, session)  # a launch counts what has ended before
    assert session.ledger.uncounted_traffic("aws") == []
    api.new.reset()
    account.send(other.instance_ids[0], 1 * GB, minutes_ago=5)
    destroy_machines(session, other)
    with_bound = entry_of(session, other)[1] or 0
    claims.count_traffic(session)  # and less than the bound, once all of it is shown
    assert entry_of(session, other)[1] == with_bound - 9 * PRICE


def test_one_request_serves_all_environments_of_a_round(
    api: FaultyApi, account: Account, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [launched(account, session) for _ in range(3)]
    api.new.reset()
    for record in records:
        claims.bound_traffic(session, record)
    monkeypatch.setattr(traffic, "LOOK_SECONDS", 60.0)
    traffic.meter(session.cloud.account.api, REGION)._looked_at = float("-inf")  # type: ignore[attr-defined]
    api.requests.clear()
    for record in records:
        claims.bound_traffic(session, record)
    assert len([request for request in api.requests if request["Action"] == "GetMetricData"]) == 1
    for record in records:
        destroy_machines(session, record)


def test_what_cannot_be_measured_is_not_launched(api: FaultyApi, account: Account, session: Session) -> None:
    api.inject(Fault("GetMetricData", "AccessDeniedException", status="403 Forbidden"))
    with pytest.raises(HostError, match="what machines have sent"):
        launched(account, session)
    assert session.ledger.entries() == []
    assert launched(account, session, full_internet=False).egress_gb == Decimal(0)
    api.faults.clear()
    destroy_machines(session, *session.environments.all())
