"""Tests the time to live and the ledger on AWS: schedules, extending them, and a destroy that is not confirmed."""

from __future__ import annotations

import base64
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

import pytest

from provisioner.base.clock import BUILDER_TTL, now
from provisioner.base.errors import BudgetError, StillThereError, UnavailableError
from provisioner.base.models import Environment
from provisioner.costs.ledger import Spending
from provisioner.family.manifest import Resources
from provisioner.machines.create import create_machines, stack_of
from provisioner.machines.destroy import destroy_machines
from provisioner.session import Session
from tests.aws.account import NOTHING, REGION, Account, MakeEnvironment, make_environment
from tests.aws.proxy import Fault, FaultyApi
from tests.command_line import ROOT, answer
from tests.waiting import until


def create(session: Session, environment: Environment) -> Environment:
    [created] = create_machines(session, [environment])
    return created


def tags_of(account: Account, ids: list[str]) -> list[dict[str, str]]:
    """Returns the tags of each of these instances."""
    rows = [
        row
        for each in account.client().describe_instances(InstanceIds=ids)["Reservations"]
        for row in each["Instances"]
    ]
    return [
        {tag["Key"]: tag["Value"] for tag in row["Tags"]}
        for row in sorted(rows, key=lambda row: str(row["InstanceId"]))
    ]


@pytest.mark.story
@pytest.mark.xdist_group("account")
def test_the_schedule_ends_machines_at_the_limit(account: Account, environment: MakeEnvironment) -> None:
    session = account.session()
    record = create(session, environment(session))
    scheduler = account.client("scheduler")
    names = {role: f"{record.id}.{role}" for role in record.machines}
    assert set(session.cloud.remaining(record)[-2:]) == {f"schedule {name}" for name in names.values()}
    for role, name in names.items():
        target = scheduler.get_schedule(GroupName="provisioner", Name=name)["Target"]
        ended = {"InstanceIds": [record.endpoints[role].instance_id], "SkipOsShutdown": True}
        assert json.loads(target["Input"]) == ended
    schedule = scheduler.get_schedule(GroupName="provisioner", Name=names["aux"])
    assert schedule["ScheduleExpression"] == f"at({record.expires_at:%Y-%m-%dT%H:%M:%S})"
    assert schedule["ScheduleExpressionTimezone"] == "UTC"
    assert schedule["FlexibleTimeWindow"] == {"Mode": "OFF"}
    assert schedule["Target"]["Arn"] == "arn:aws:scheduler:::aws-sdk:ec2:terminateInstances"
    ids = sorted(endpoint.instance_id or "" for endpoint in record.endpoints.values())
    role = account.client("iam").get_role(RoleName="provisioner-scheduler")["Role"]
    assert schedule["Target"]["RoleArn"] == role["Arn"]
    trusted = [s["Principal"]["Service"] for s in role["AssumeRolePolicyDocument"]["Statement"]]
    assert trusted == ["scheduler.amazonaws.com"]
    rights = account.client("iam").get_role_policy(
        RoleName=role["RoleName"], PolicyName="terminate-provisioner-instances"
    )["PolicyDocument"]["Statement"]
    assert [(s["Action"], list(s["Condition"])) for s in rights] == [("ec2:TerminateInstances", ["StringLike"])]

    later = session.environments.update(record, expires_at=record.expires_at + timedelta(hours=1))
    session.cloud.move_ttl(later)
    for name in names.values():
        moved = scheduler.get_schedule(GroupName="provisioner", Name=name)
        assert moved["ScheduleExpression"] == f"at({later.expires_at:%Y-%m-%dT%H:%M:%S})"
    assert scheduler.get_schedule(GroupName="provisioner", Name=names["aux"])["Target"] == schedule["Target"]
    for tags in tags_of(account, ids):
        assert tags["provisioner:expires-at"] == f"{later.expires_at:%Y-%m-%dT%H:%M:%SZ}"
    # An apply makes nothing anew because of a lease or the extended time to live, and writes the time that is there.
    session.cloud.renew_lease(later)
    before = tags_of(account, ids)
    log = session.home.stacks / record.stack / "terraform.log"
    log.unlink()
    create_machines(session, [later])
    changes = [json.loads(line)["changes"] for line in log.read_text().splitlines() if '"changes":' in line]
    assert [(c["add"], c["remove"]) for c in changes if c["operation"] == "apply"] == [(0, 0)]
    assert tags_of(account, ids) == before
    for name in names.values():
        assert (
            scheduler.get_schedule(GroupName="provisioner", Name=name)["ScheduleExpression"]
            == moved["ScheduleExpression"]
        )

    destroy_machines(session, later)
    assert scheduler.list_schedules(GroupName="provisioner")["Schedules"] == []
    assert account.everything() == NOTHING


def test_a_machine_that_ended_does_not_extend_the_other(account: Account, environment: MakeEnvironment) -> None:
    session = account.session()
    record = create(session, environment(session))
    # The agent switches the aux VM off, and an hour passes.
    account.client().terminate_instances(InstanceIds=[record.endpoints["aux"].instance_id])
    account.forget_ended_instances()
    refusals = account.fire_schedules()
    assert account.everything()["instances"] == []
    assert refusals == ["InvalidInstanceID.NotFound"]  # the aux VM's own
    assert [orphan.environment for orphan in session.cloud.list_resources([REGION])] == [record.id]
    destroy_machines(session, record)
    assert account.everything() == NOTHING


def test_every_machine_carries_its_own_timer(account: Account, environment: MakeEnvironment) -> None:
    session = account.session()
    record = create(session, environment(session))
    ec2 = account.client()
    for endpoint in record.endpoints.values():
        attribute = ec2.describe_instance_attribute(InstanceId=endpoint.instance_id, Attribute="userData")
        text = base64.b64decode(attribute["UserData"]["Value"]).decode()
        [boot] = json.loads(text.partition("\n")[2])["bootcmd"]
        assert boot[-1] == str(int(record.expires_at.timestamp()))
        assert "systemctl poweroff" in boot[2]
    destroy_machines(session, record)


def test_a_launch_reserves_the_worst_and_settles_the_actual(account: Account, environment: MakeEnvironment) -> None:
    session = account.session()
    record = create(session, environment(session))
    [held] = session.ledger.entries(unsettled=True)
    # Two machines of the dearer type with two vCPUs each, two volumes, the primary machine's address; for four hours
    # and ten minutes.
    by_hour = 2 * 0.0416 + 4 * 0.05 + 2 * 16 * 0.08 / (28 * 24) + 0.005
    assert held.reserved_micro_usd == pytest.approx(by_hour * (4 + 1 / 6) * 1e6, abs=1)
    assert float(record.usd_per_hour or 0) == pytest.approx(by_hour - 2 * 0.0208, abs=1e-6)
    destroy_machines(session, record)
    [settled] = session.ledger.entries()
    assert 0 < (settled.actual_micro_usd or 0) < held.reserved_micro_usd / 20
    assert settled.ended_at
    assert now() - settled.ended_at < timedelta(minutes=1)


@pytest.mark.parametrize("shares", [False, True], ids=["alone", "shares a stack"])
def test_a_run_costs_nothing_from_shutting_down_on(
    api: FaultyApi, account: Account, environment: MakeEnvironment, shares: bool
) -> None:
    session = account.session()
    record = create(session, environment(session, stack="shared-stack" if shares else None))
    api.modes.lingers = True
    with ThreadPoolExecutor(1) as pool:
        ending = pool.submit(destroy_machines, session, record)
        try:
            until(lambda: ending.done() or session.ledger.entries()[0].ended_at is not None)
            assert not ending.done()
            ec2 = account.client()
            rows = ec2.describe_instances(InstanceIds=list(record.instance_ids))["Reservations"]
            assert {row["State"]["Name"] for each in rows for row in each["Instances"]} == {"shutting-down"}
            assert session.environments.find(record.id).status == "destroying"  # until it is gone
        finally:
            api.modes.end_lingering()
        ending.result()
    assert session.environments.all() == []


def test_without_the_clouds_answer_nothing_is_destroyed(
    api: FaultyApi, account: Account, environment: MakeEnvironment
) -> None:
    session = account.session()
    record = create(session, environment(session, aux=False))
    # Terraform has destroyed everything, but the cloud cannot confirm it.
    stack_of(session, record).remove({record.id}, session.progress.note)
    api.inject(Fault("DescribeInstances", "InternalError", status="500 Error"))
    with pytest.raises(StillThereError, match="did not say"):
        destroy_machines(session, record)
    [listed] = session.environments.all()
    assert listed.status == "unverified"
    assert len(session.ledger.entries(unsettled=True)) == 1
    api.faults.clear()
    destroy_machines(session, listed)
    assert session.environments.all() == []
    assert session.ledger.entries(unsettled=True) == []


def test_an_image_builder_has_a_limit_too(account: Account, environment: MakeEnvironment) -> None:
    session = account.session()
    record = environment(session, aux=False, full_internet=True)
    builder = session.environments.save(
        record.model_copy(update={"kind": "builder", "expires_at": record.created_at + BUILDER_TTL})
    )
    builder = create(session, builder)
    attribute = "instanceInitiatedShutdownBehavior"

    def behavior() -> str:
        instance = builder.endpoints["primary"].instance_id
        answer = account.client().describe_instance_attribute(InstanceId=instance, Attribute=attribute)
        return str(answer["InstanceInitiatedShutdownBehavior"]["Value"])

    # The disk may outlive the builder only from just before it is switched off at the end of the build.
    assert behavior() == "terminate"
    session.cloud.keep_when_off(builder)
    assert behavior() == "stop"
    assert account.client("scheduler").get_schedule(GroupName="provisioner", Name=f"{builder.id}.primary")
    destroy_machines(session, builder)
    assert account.everything() == NOTHING


def test_a_plan_prices_everything_and_creates_only_what_fits(account: Account) -> None:
    session = account.session()
    guess = str(ROOT / "examples" / "number_guess")
    planned = answer(session.home, "plan", guess, "easy", "--cloud", "aws", "--region", REGION, "--ttl", "2h")
    what = [line["what"] for line in planned["lines"]]
    assert what[0].startswith("primary: t3")
    assert {"primary: 16 GiB volume", "primary: public IPv4 address"} <= set(what)
    assert all(line["source"] and line["age_days"] >= 0 for line in planned["lines"])
    assert 900_000 < planned["worst_micro_usd"] < 1_900_000  # 10 GB, as the image may have the internet
    assert planned["builder_micro_usd"] > 0
    poor = replace(session, spending=Spending(budget=Decimal("0.01")))
    with pytest.raises(BudgetError, match=r"for this launch at most = .*, more than 0.0100 USD"):
        make_environment(poor)
    assert account.everything() == NOTHING
    assert session.ledger.entries() == []
    assert not list(session.home.environments.iterdir())
    assert not list(session.home.locks.glob("lease-*"))


def test_without_a_price_nothing_is_launched(account: Account) -> None:
    session = account.session(regions=("eu-north-1",))
    with pytest.raises(UnavailableError, match="no price is known"):
        session.cloud.choose(Resources(), None)


def test_what_the_cloud_shows_only_later_is_found_all_the_same(
    account: Account, environment: MakeEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = account.session()
    record = create(session, environment(session, aux=False))
    # Terraform was killed before it wrote its state, and EC2 does not list the new instance yet.
    (session.home.stacks / record.stack / "terraform.tfstate").unlink()
    record = session.environments.update(record, endpoints={})
    shown, first = session.cloud.remaining, iter([list[str]()])
    monkeypatch.setattr(session.cloud, "remaining", lambda one: next(first, None) or shown(one))
    monkeypatch.setattr("provisioner.machines.destroy.SECOND_LOOK_SECONDS", 0.1)
    destroy_machines(session, record)
    assert account.everything() == NOTHING
