"""Tests errors of EC2: without capacity or quota another place is tried, throttling repeats, missing rights stop."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from provisioner.base.clock import now
from provisioner.base.errors import CapacityError, HostError, TerraformError, UnavailableError
from provisioner.base.models import Destination, Environment
from provisioner.clouds.aws import cleanup, images
from provisioner.clouds.aws.api import ENVIRONMENT_TAG, Api
from provisioner.clouds.aws.cloud import AwsCloud
from provisioner.clouds.aws.network import find_network
from provisioner.environment import lifecycle
from provisioner.family.loader import load_family
from provisioner.family.manifest import Resources
from provisioner.machines.create import create_machines, create_shared_network
from provisioner.machines.destroy import destroy_machines
from provisioner.session import Session
from provisioner.ssh.keys import ed25519_key_pair
from tests.aws.account import AMI, NOTHING, REGION, Account, MakeEnvironment
from tests.aws.moto_gaps import FREE_TYPES, SpotRequest
from tests.aws.new_resources import KEY_PAIRS
from tests.aws.proxy import Fault, FaultyApi, Request
from tests.command_line import ROOT
from tests.soak.processes import descendants


@pytest.fixture
def session(api: FaultyApi, account: Account) -> Iterator[Session]:
    """A session whose environments are destroyed at the end."""
    opened = account.session()
    yield opened
    api.faults.clear()
    for environment in opened.environments.all():
        destroy_machines(opened, environment)


def zone_of(account: Account, request: Request) -> str:
    subnet = request["NetworkInterface.1.SubnetId"] if "NetworkInterface.1.SubnetId" in request else request["SubnetId"]
    zone = account.client().describe_subnets(SubnetIds=[subnet])["Subnets"][0]["AvailabilityZone"]
    return str(zone)


def create(session: Session, environment: Environment) -> Environment:
    [created] = create_machines(session, [environment])
    return created


@pytest.mark.parametrize(
    ("code", "words"),
    [
        pytest.param("InsufficientInstanceCapacity", "no capacity for t3.small", marks=pytest.mark.story),
        ("InsufficientVolumeCapacity", "no capacity for a volume"),
    ],
    ids=["instances", "volumes"],
)
@pytest.mark.xdist_group("account")
def test_a_zone_without_capacity_is_left_for_the_next(
    api: FaultyApi, account: Account, session: Session, environment: MakeEnvironment, code: str, words: str
) -> None:
    record = environment(session, aux=False)
    first = session.cloud.place(record)["zone"]
    fault = api.inject(
        Fault(
            "RunInstances", code, status="500 Error",
            when=lambda request: zone_of(account, request) == first,
        )
    )  # fmt: skip
    created = create(session, record)
    assert created.placement["zone"] != first
    assert created.placement["primary"] == record.machines["primary"].size.types[0]
    assert 0 < len(fault.hits) <= 3  # the provider by itself would ask for many minutes
    assert any(words in note and "trying t3.small" in note for note in account.progress.notes)
    assert not any("creating it again" in note for note in account.progress.notes)


def test_a_quota_of_one_type_moves_on_to_the_next_type(
    api: FaultyApi, account: Account, session: Session, environment: MakeEnvironment
) -> None:
    fault = api.inject(
        Fault("RunInstances", "InstanceLimitExceeded", when=lambda request: request["InstanceType"] == "t3.small")
    )
    created = create(session, environment(session, aux=False))
    assert created.placement["primary"] == "t3.medium"
    assert len(fault.hits) <= 3
    described = account.client().describe_instances(InstanceIds=[created.endpoints["primary"].instance_id])
    assert described["Reservations"][0]["Instances"][0]["InstanceType"] == "t3.medium"


def test_spot_comes_first_and_on_demand_after_it(
    api: FaultyApi, account: Account, environment: MakeEnvironment
) -> None:
    session = account.session(spot=True)
    record = environment(session, aux=False)
    fault = api.inject(
        Fault(
            "RunInstances", "MaxSpotInstanceCountExceeded",
            when=lambda request: request.get("InstanceMarketOptions.MarketType") == "spot",
        )
    )  # fmt: skip
    created = create(session, record)
    assert fault.hits
    assert created.placement["market"] == "on-demand"
    destroy_machines(session, created)


def test_a_spot_request_that_cannot_end_keeps_nothing_alive(
    api: FaultyApi, account: Account, environment: MakeEnvironment
) -> None:
    session = account.session(spot=True)
    created = create(session, environment(session, aux=False))
    assert created.placement["market"] == "spot"
    requests = account.client().describe_spot_instance_requests()["SpotInstanceRequests"]  # those of earlier tests, too
    instance = created.endpoints["primary"].instance_id
    [request] = [request["SpotInstanceRequestId"] for request in requests if request["InstanceId"] == instance]
    assert f"spot request {request}" in session.cloud.remaining(created)
    fault = api.inject(Fault("CancelSpotInstanceRequests", "UnauthorizedOperation", status="403 Forbidden"))
    destroy_machines(session, created)
    assert fault.hits
    assert account.everything() == NOTHING
    assert session.environments.all() == []


def test_a_spot_request_that_stays_is_named_with_the_reason(
    api: FaultyApi, account: Account, session: Session, environment: MakeEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = environment(session, aux=False)
    tags = [{"Key": ENVIRONMENT_TAG, "Value": record.id}, {"Key": "provisioner:owner", "Value": "me"}]
    account.client().run_instances(
        ImageId=AMI, MinCount=1, MaxCount=1, InstanceMarketOptions={"MarketType": "spot"},
        TagSpecifications=[{"ResourceType": "instance", "Tags": tags}],
    )  # fmt: skip
    api.inject(Fault("CancelSpotInstanceRequests", "UnauthorizedOperation", status="403 Forbidden"))
    with monkeypatch.context() as patch:
        patch.setattr(SpotRequest, "state", "open")  # it could still start another instance
        with pytest.raises(HostError, match=r"Cancelling the spot requests.*UnauthorizedOperation"):
            cleanup.remove(Api(None, REGION), REGION, record.id, just_created=True)
        [request] = cleanup.remaining(Api(None, REGION), REGION, record.id)
        assert request.startswith("spot request sir-")
    assert account.everything() == NOTHING  # all that costs money is gone


def test_without_capacity_all_places_are_tried_and_named(
    api: FaultyApi, account: Account, session: Session, environment: MakeEnvironment
) -> None:
    api.inject(Fault("RunInstances", "InsufficientInstanceCapacity", status="500 Error"))
    records = [environment(session, aux=False, stack="many", types=("t3.small",)) for _ in range(2)]
    with pytest.raises(CapacityError, match="nothing else to try") as caught:
        create_machines(session, records)
    assert "region" in caught.value.settings
    # All are named at once: none of the others waits for another apply.
    assert caught.value.environments == {record.id for record in records}
    zones = {zone_of(account, request) for request in api.requests if request["Action"] == "RunInstances"}
    assert len(zones) >= 2
    api.faults.clear()
    destroy_machines(session, *[session.environments.find(record.id) for record in records])


def test_throttling_is_repeated_and_told(
    api: FaultyApi, account: Account, session: Session, environment: MakeEnvironment
) -> None:
    fault = api.inject(Fault("CreateSecurityGroup", "RequestLimitExceeded", status="503 Error", times=4))
    created = create(session, environment(session, aux=False))
    assert len(fault.hits) == 4
    assert created.endpoints
    assert any("throttles requests" in note for note in account.progress.notes)


def test_a_key_pair_that_is_not_found_at_once_is_made_again(
    api: FaultyApi, account: Account, session: Session, environment: MakeEnvironment
) -> None:
    api.new.rare[KEY_PAIRS] = 1
    created = create(session, environment(session, aux=False))
    assert created.endpoints
    assert [note for note in account.progress.notes if "does not show a new resource everywhere yet" in note]


def test_stacks_keep_to_ec2s_rate_and_all_come_up(
    api: FaultyApi, account: Account, session: Session, environment: MakeEnvironment
) -> None:
    stacks = [[environment(session, aux=False, stack=name) for _ in range(5)] for name in ("one", "other")]
    create_shared_network(session, account.record(session, REGION))
    with ThreadPoolExecutor(len(stacks)) as pool:
        created = [one for stack in pool.map(partial(create_machines, session), stacks) for one in stack]
    assert all(one.endpoints for one in created)
    # Each found a full bucket when its turn came, and took all of it.
    [note] = session.home.locks.glob(f"launches-*-{REGION}")
    tokens, _ = json.loads(note.read_bytes())
    assert tokens == pytest.approx(0, abs=0.001)


def test_a_rule_whose_answer_was_lost_is_made_again(
    api: FaultyApi, account: Account, session: Session, environment: MakeEnvironment
) -> None:
    lost = api.inject(Fault("CreateNetworkAclEntry", "InternalError", status="500 Error", times=1, done=True))
    allowed = (Destination(cidr="198.51.100.7/32", port=443),)
    created = create(session, environment(session, aux=False, allowed=allowed))
    assert len(lost.hits) == 1
    assert any("a reply from the cloud was lost" in note for note in account.progress.notes)
    acls = account.client().describe_network_acls(
        Filters=[{"Name": "tag:provisioner:environment", "Values": [created.id]}]
    )["NetworkAcls"]
    out = [
        entry["CidrBlock"]
        for acl in acls
        for entry in acl["Entries"]
        if entry["Egress"] and entry["RuleAction"] == "allow"
    ]
    assert sorted(out) == ["198.51.100.7/32", "203.0.113.10/32"]


def test_an_environment_that_lost_an_answer_is_made_again(
    api: FaultyApi, account: Account, session: Session, environment: MakeEnvironment
) -> None:
    lost = api.inject(Fault("AuthorizeSecurityGroupEgress", "InternalError", status="500 Error", times=1, done=True))
    created = create(session, environment(session, aux=False))
    assert len(lost.hits) == 1
    assert any("creating it again" in note for note in account.progress.notes)
    answer = account.client().describe_instances(Filters=[{"Name": "instance-state-name", "Values": ["running"]}])
    assert [i["InstanceId"] for r in answer["Reservations"] for i in r["Instances"]] == [
        created.endpoints["primary"].instance_id
    ]


def test_a_fault_of_ec2s_own_is_asked_again(
    api: FaultyApi, account: Account, session: Session, environment: MakeEnvironment
) -> None:
    fault = api.inject(Fault("RunInstances", "InternalError", status="500 Error", times=2, done=True))
    created = create(session, environment(session, aux=False))
    assert len(fault.hits) == 2  # of one apply: the provider asks twice
    assert any("an error of its own (InternalError)" in note for note in account.progress.notes)
    answer = account.client().describe_instances(Filters=[{"Name": "instance-state-name", "Values": ["running"]}])
    assert [i["InstanceId"] for r in answer["Reservations"] for i in r["Instances"]] == [
        created.endpoints["primary"].instance_id
    ]


@pytest.mark.parametrize("killed_at", ["CreateVpc", "CreateRoute"])
def test_a_network_whose_apply_was_killed_is_made_anew(api: FaultyApi, account: Account, killed_at: str) -> None:
    region = {"CreateVpc": "eu-central-1", "CreateRoute": "eu-west-3"}[killed_at]
    session = account.session(regions=(region,))
    record = account.record(session, region)

    def kill(_: Request) -> bool:
        if fault.hits:
            return False
        for pid in descendants(os.getpid(), "terraform"):
            os.kill(pid, signal.SIGKILL)
        return True

    # AWS does what was asked, but the process that asked has ended.
    fault = api.inject(Fault(killed_at, "InternalError", status="500 Error", times=1, done=True, when=kill))
    with pytest.raises(TerraformError):
        create_shared_network(session, record)
    create_shared_network(session, record)
    assert any("was interrupted" in note for note in account.progress.notes)
    network = find_network(Api(None, region), region, "")
    assert network is not None
    ours = [{"Name": "tag:provisioner:network", "Values": [region]}]
    assert len(account.client(region=region).describe_vpcs(Filters=ours)["Vpcs"]) == 2


def test_a_refusal_for_a_group_that_ec2_does_not_show_yet_passes(
    api: FaultyApi, session: Session, environment: MakeEnvironment
) -> None:
    fault = api.inject(Fault("RevokeSecurityGroupEgress", "UnauthorizedOperation", status="403 Forbidden", times=1))
    create(session, environment(session, aux=False))
    assert len(fault.hits) == 1


def test_missing_rights_name_the_policy(
    api: FaultyApi, account: Account, session: Session, environment: MakeEnvironment
) -> None:
    fault = api.inject(Fault("RunInstances", "UnauthorizedOperation", status="403 Forbidden"))
    with pytest.raises(HostError, match="UnauthorizedOperation") as caught:
        create(session, environment(session, aux=False))
    assert "aws policy" in (caught.value.hint or "")
    assert len(fault.hits) == 3


def test_an_account_of_the_free_plan_is_told_what_to_do(
    api: FaultyApi, account: Account, session: Session, environment: MakeEnvironment
) -> None:
    api.modes.free_plan = True
    with pytest.raises(HostError, match=r"free plan, which does not include t3\.medium") as caught:
        create(session, environment(session, aux=False, types=("t3.medium",)))
    assert "Try again" in (caught.value.hint or "")
    assert "paid plan" in (caught.value.hint or "")
    assert len([request for request in api.requests if request["Action"] == "RunInstances"]) == 1
    # From now on, only what the plan includes is chosen.
    again = account.session()
    chosen = again.cloud.choose(Resources(), None)["primary"].types
    assert set(chosen) <= set(FREE_TYPES)
    assert any("free plan" in note for note in again.cloud.notes())
    with pytest.raises(UnavailableError, match="free plan") as unavailable:
        again.cloud.choose(Resources(memory_gb=64), None)
    assert "paid plan" in (unavailable.value.hint or "")
    destroy_machines(again, create(again, environment(again, aux=False, types=chosen)))


def test_an_account_without_a_role_for_spot_is_told_what_to_do(
    api: FaultyApi, account: Account, environment: MakeEnvironment
) -> None:
    session = account.session(spot=True)
    record = environment(session, aux=False)
    api.inject(Fault("RunInstances", "AuthFailure.ServiceLinkedRoleCreationNotPermitted", status="403 Forbidden"))
    with pytest.raises(HostError, match="no role for spot instances") as caught:
        create(session, record)
    assert "aws setup" in (caught.value.hint or "")
    api.faults.clear()
    destroy_machines(session, session.environments.find(record.id))


def test_an_allowlist_whose_subnet_is_taken_gets_another(
    account: Account, session: Session, environment: MakeEnvironment
) -> None:
    create_shared_network(session, account.record(session, REGION))
    allowed = (Destination(cidr="198.51.100.7/32", port=443),)
    record = environment(session, aux=False, allowed=allowed)
    record = session.environments.update(record, placement=session.cloud.place(record))
    network = find_network(Api(None, REGION), REGION, "")
    assert network is not None
    theirs = account.client().create_subnet(VpcId=network.vpcs["offline"], CidrBlock=record.placement["allowlist"])
    created = create(session, record)
    account.client().delete_subnet(SubnetId=theirs["Subnet"]["SubnetId"])
    assert created.placement["allowlist"] != record.placement["allowlist"]
    assert any("another environment has taken its subnet" in note for note in account.progress.notes)


def test_a_machine_that_ends_at_launch_points_at_its_disks_key(
    api: FaultyApi, account: Account, session: Session, environment: MakeEnvironment
) -> None:
    api.modes.without_key = True
    with pytest.raises(HostError, match="EC2 ended the machine as it started it") as caught:
        create(session, environment(session, aux=False))
    assert "kms:CreateGrant" in (caught.value.hint or "")


def test_a_region_that_a_policy_closes_is_not_swept(api: FaultyApi, account: Account, session: Session) -> None:
    assert "eu-west-3" in (session.cloud.open_regions(account.progress.note) or [])
    api.inject(Fault("DescribeInstances", "UnauthorizedOperation", status="403 Forbidden", region="eu-west-3"))
    regions = session.cloud.open_regions(account.progress.note)
    assert regions is not None
    assert "eu-west-3" not in regions
    assert session.cloud.region in regions
    assert any("may not list resources there: eu-west-3" in note for note in account.progress.notes)
    assert session.cloud.list_resources(None) == []
    # A region that the account has switched on itself does not know every session.
    unknown = api.inject(Fault("DescribeInstances", "AuthFailure", status="401 Unauthorized", region="eu-west-2"))
    assert not {"eu-west-2", "eu-west-3"} & set(session.cloud.open_regions(account.progress.note) or [])
    assert unknown.hits
    assert session.cloud.list_resources(None) == []
    # Where the credentials have no right at all, that is an error and no empty account.
    api.inject(Fault("DescribeInstances", "UnauthorizedOperation", status="403 Forbidden", region=session.cloud.region))
    with pytest.raises(HostError, match="UnauthorizedOperation"):
        session.cloud.list_resources(None)


def test_resources_without_tags_are_no_lack_of_rights(
    api: FaultyApi, account: Account, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = account.record(session, REGION)
    tags = [{"Key": ENVIRONMENT_TAG, "Value": record.id}, {"Key": "provisioner:owner", "Value": "me"}]
    account.client().import_key_pair(
        KeyName=f"{record.id}-primary", PublicKeyMaterial=ed25519_key_pair().public.encode(),
        TagSpecifications=[{"ResourceType": "key-pair", "Tags": tags}],
    )  # fmt: skip
    api.inject(Fault("DeleteKeyPair", "UnauthorizedOperation", status="403 Forbidden"))
    with monkeypatch.context() as patch:
        patch.setattr(cleanup, "REFUSED_SECONDS", 1.0)
        with pytest.raises(HostError, match=r"Deleting the key pair.*UnauthorizedOperation"):
            cleanup.remove(Api(None, REGION), REGION, record.id)
    api.faults.clear()
    # EC2 lists it for some seconds more.
    stale = api.inject(Fault("DeleteKeyPair", "UnauthorizedOperation", status="403 Forbidden", times=2))
    cleanup.remove(Api(None, REGION), REGION, record.id)
    assert len(stale.hits) == 2
    assert account.everything() == NOTHING


def test_a_machine_out_of_reach_names_the_admitted_addresses(account: Account, environment: MakeEnvironment) -> None:
    session = account.session(controller_cidrs=())
    record = environment(session, aux=False).model_copy(update={"placement": {"controllers": "203.0.113.10/32"}})
    assert "Only 203.0.113.10/32 is let in" in (session.cloud.unreachable_hint(record) or "")
    session.ledger.settle(record.id, now(), 0)


def test_any_other_failure_is_terraforms(
    api: FaultyApi, account: Account, session: Session, environment: MakeEnvironment
) -> None:
    api.inject(Fault("RunInstances", "InvalidParameterValue"))
    with pytest.raises(TerraformError, match="InvalidParameterValue"):
        create(session, environment(session, aux=False))


def test_a_region_without_quota_is_left_for_the_next(
    api: FaultyApi, account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    # moto has none of Debian's, and of many in one region the newest is one by chance.
    monkeypatch.setitem(images.VENDORS, "debian-12", ("amazon", "amzn-ami-hvm-2017.09.1*"))
    regions = ("us-east-1", "us-east-2")
    refused = [api.inject(Fault("RunInstances", "VcpuLimitExceeded", region=region)) for region in regions]
    session = account.session(regions=regions)
    family = load_family(ROOT / "tests" / "contract" / "families" / "echo")
    with pytest.raises(CapacityError, match="nothing else to try"):
        lifecycle.up(session, family, "main")
    # One request in each: the quota is the same for all zones and types.
    assert [len(fault.hits) for fault in refused] == [1, 1]
    assert any("Trying another place" in note for note in account.progress.notes)
    assert session.environments.all() == []
    assert account.everything("us-east-2") == NOTHING


def test_what_aws_refuses_while_the_network_is_made_says_what_to_do(api: FaultyApi, account: Account) -> None:
    session = account.session(regions=("ap-south-1",))
    api.inject(Fault("CreateVpc", "UnauthorizedOperation", status="403 Forbidden"))
    with pytest.raises(HostError, match="UnauthorizedOperation") as caught:
        create_shared_network(session, account.record(session, "ap-south-1"))
    assert caught.value.exit_code == 3
    assert "aws policy" in (caught.value.hint or "")


def test_a_region_without_room_for_the_network_is_left_for_the_next(
    api: FaultyApi, account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(images.VENDORS, "debian-12", ("amazon", "amzn-ami-hvm-2017.09.1*"))
    sold_in_the_second = account.session().cloud
    assert isinstance(sold_in_the_second, AwsCloud)
    full = api.inject(Fault("CreateInternetGateway", "InternetGatewayLimitExceeded", region="ap-southeast-2"))
    reached = api.inject(Fault("RunInstances", "VcpuLimitExceeded", region=REGION))
    session = account.session(regions=("ap-southeast-2", REGION))
    vars(session.cloud)["catalogue"] = sold_in_the_second.catalogue
    with pytest.raises(CapacityError, match="vCPUs"):
        lifecycle.up(session, load_family(ROOT / "tests" / "contract" / "families" / "echo"), "main")
    assert full.hits
    assert len(reached.hits) == 1
    assert any("internet gateways" in note and "Trying another place" in note for note in account.progress.notes)
