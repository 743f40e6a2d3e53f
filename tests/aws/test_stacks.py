"""Tests the real provider against moto: what it creates, that a second apply changes nothing, that nothing remains."""

from __future__ import annotations

import ipaddress
import json
from typing import Any

import pytest
from moto.core import DEFAULT_ACCOUNT_ID  # type: ignore[attr-defined]
from moto.ec2.models import ec2_backends
from moto.ec2.models.instances import StateReason

from provisioner.base.errors import HostError, StillThereError
from provisioner.base.models import Destination, Environment
from provisioner.clouds.aws import stacks
from provisioner.clouds.aws.api import Api
from provisioner.clouds.aws.network import Networks, find_network
from provisioner.machines.create import create_machines, create_shared_network, stack_of
from provisioner.machines.destroy import destroy_machines
from provisioner.session import Session
from tests.aws.account import CONTROLLER, NOTHING, REGION, Account, MakeEnvironment
from tests.aws.proxy import FaultyApi
from tests.aws.rights.requests import ACCOUNT


def created(session: Session, *environments: Environment) -> list[Environment]:
    """Creates environments by one apply."""
    return create_machines(session, list(environments))


def instances(account: Account, environment: Environment, region: str = REGION) -> dict[str, dict[str, Any]]:
    """Returns the environment's instances that are not terminated, by role."""
    filters = [{"Name": "tag:provisioner:environment", "Values": [environment.id]}]
    reservations = account.client(region=region).describe_instances(Filters=filters)["Reservations"]
    running = [i for r in reservations for i in r["Instances"] if i["State"]["Name"] != "terminated"]
    return {tags(i)["provisioner:role"]: i for i in running}


def tags(thing: dict[str, Any]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in thing.get("Tags", [])}


def network_of(account: Account, instance: dict[str, Any]) -> dict[str, Any]:
    """Returns the rules for an instance's outgoing packets: group rules, routes, ACL entries and DNS."""
    ec2 = account.client()
    subnet, vpc = instance["SubnetId"], instance["VpcId"]
    groups = [group["GroupId"] for group in instance["NetworkInterfaces"][0]["Groups"]]
    out = [p for g in ec2.describe_security_groups(GroupIds=groups)["SecurityGroups"] for p in g["IpPermissionsEgress"]]
    [table] = ec2.describe_route_tables(Filters=[{"Name": "association.subnet-id", "Values": [subnet]}])["RouteTables"]
    [acl] = ec2.describe_network_acls(Filters=[{"Name": "association.subnet-id", "Values": [subnet]}])["NetworkAcls"]
    dns = ec2.describe_vpc_attribute(VpcId=vpc, Attribute="enableDnsSupport")["EnableDnsSupport"]["Value"]
    return {
        "groups": groups,
        "rules": sorted(r["CidrIp"] for p in out for r in p["IpRanges"]),
        "members": sorted(pair["GroupId"] for p in out for pair in p["UserIdGroupPairs"]),
        "routes": sorted(r["DestinationCidrBlock"] for r in table["Routes"] if r.get("GatewayId") != "local"),
        "acl": sorted(
            f"{e['CidrBlock']} {e.get('PortRange', {}).get('From', '*')}"
            for e in acl["Entries"]
            if e["Egress"] and e["RuleAction"] == "allow"
        ),
        "dns": dns,
    }


def public(cidrs: list[str]) -> list[str]:
    """Returns the networks that contain a public address other than the controller's."""
    controller = ipaddress.ip_network(CONTROLLER)
    return [c for c in cidrs if not ipaddress.ip_network(c).is_private and ipaddress.ip_network(c) != controller]


@pytest.mark.story
@pytest.mark.xdist_group("account")
def test_each_permission_side_by_side_gets_what_was_promised(
    api: FaultyApi, account: Account, environment: MakeEnvironment
) -> None:
    session = account.session()
    allowed = (Destination(cidr="198.51.100.7/32", port=443), Destination(cidr="192.0.2.0/24", port=8080))
    offline, online, allowing = records = created(
        session,
        environment(session, stack="three"),
        environment(session, stack="three", full_internet=True),
        environment(session, stack="three", allowed=allowed),
    )
    by_role = instances(account, offline)
    assert_offline(account, by_role)
    primary, aux = offline.endpoints["primary"], offline.endpoints["aux"]
    assert (primary.host, primary.port, primary.jump) == (by_role["primary"]["PublicIpAddress"], 22, None)
    assert (aux.host, aux.jump) == (by_role["aux"]["PrivateIpAddress"], "primary")
    assert aux.private_address == aux.host
    assert_online(account, online)
    assert_allowlisted(account, allowing)

    # A second apply changes nothing. Nor does it create again what EC2 does not show.
    log = session.home.stacks / "three" / "terraform.log"
    log.unlink()
    stack_of(session, offline).apply(session.progress.note, refresh=True)
    api.new.hide_again(600, "DescribeInstances", "DescribeSecurityGroups", "DescribeSecurityGroupRules")
    create_machines(session, records)
    api.new.reset()
    changes = [json.loads(line)["changes"] for line in log.read_text().splitlines() if '"changes":' in line]
    assert [(c["add"], c["change"], c["remove"]) for c in changes if c["operation"] == "apply"] == [(0, 0, 0)] * 2

    for record in records:
        destroy_machines(session, record)
        assert session.cloud.remaining(record) == []
    assert account.everything() == NOTHING
    assert not (session.home.stacks / "three").exists()


def assert_offline(account: Account, by_role: dict[str, dict[str, Any]]) -> None:
    """Checks that there are three layers around each machine, each of which lets nothing out by itself."""
    assert set(by_role) == {"primary", "aux"}
    for instance in by_role.values():
        network = network_of(account, instance)
        assert (network["rules"], network["members"]) == ([], network["groups"])
        assert network["routes"] == [CONTROLLER]
        assert network["acl"] == ["10.215.0.0/16 0", f"{CONTROLLER} 1024"]
        assert not network["dns"]
        options = instance["MetadataOptions"]
        assert (options["HttpTokens"], options["HttpPutResponseHopLimit"]) == ("required", 1)
        assert "IamInstanceProfile" not in instance
    assert "PublicIpAddress" not in by_role["aux"]


def assert_online(account: Account, record: Environment) -> None:
    """Checks that the machines get out, and that only the controller gets in."""
    network = network_of(account, instances(account, record)["aux"])
    assert (network["rules"], network["routes"], network["dns"]) == (["0.0.0.0/0"], ["0.0.0.0/0"], True)
    [group] = account.client().describe_security_groups(GroupIds=network["groups"])["SecurityGroups"]
    ingress = [(p.get("FromPort"), [r["CidrIp"] for r in p["IpRanges"]]) for p in group["IpPermissions"]]
    assert sorted(ingress, key=str) == [(22, [CONTROLLER]), (None, [])]
    assert all(endpoint.jump is None for endpoint in record.endpoints.values())


def assert_allowlisted(account: Account, record: Environment) -> None:
    """Checks that every layer opens the destinations, and nothing else."""
    by_role = instances(account, record)
    network = network_of(account, by_role["primary"])
    # The internet gateway drops what comes from a machine without a public address.
    assert "PublicIpAddress" in by_role["aux"]
    assert record.endpoints["aux"].jump is None
    assert network["rules"] == ["192.0.2.0/24", "198.51.100.7/32"]
    assert network["routes"] == ["192.0.2.0/24", "198.51.100.7/32", CONTROLLER]
    assert network["acl"] == ["192.0.2.0/24 8080", "198.51.100.7/32 443", f"{CONTROLLER} 1024"]
    assert not network["dns"]


def test_everything_is_tagged_encrypted_and_of_the_right_size(account: Account, environment: MakeEnvironment) -> None:
    session = account.session()
    [record] = created(session, environment(session))
    ec2 = account.client()
    expected = {"provisioner:environment", "provisioner:owner", "provisioner:stack", "provisioner:batch"}
    expected |= {"provisioner:expires-at", "provisioner:role"}
    by_role = instances(account, record)
    for instance in by_role.values():
        assert expected <= tags(instance).keys()
        [device] = instance["BlockDeviceMappings"]
        assert device["Ebs"]["DeleteOnTermination"]
        [volume] = ec2.describe_volumes(VolumeIds=[device["Ebs"]["VolumeId"]])["Volumes"]
        assert (volume["Encrypted"], volume["VolumeType"], volume["Size"]) == (True, "gp3", 16)
        assert expected <= tags(volume).keys()
        behavior = ec2.describe_instance_attribute(
            InstanceId=instance["InstanceId"], Attribute="instanceInitiatedShutdownBehavior"
        )
        assert behavior["InstanceInitiatedShutdownBehavior"]["Value"] == "terminate"
    assert {key["KeyName"] for key in ec2.describe_key_pairs()["KeyPairs"]} == {
        f"{record.id}-primary",
        f"{record.id}-aux",
    }
    state = (session.home.stacks / record.stack / "terraform.tfstate").read_text()
    assert "PRIVATE KEY" not in state
    destroy_machines(session, record)
    assert account.everything() == NOTHING


def test_twenty_environments_of_one_stack_are_strangers(account: Account, environment: MakeEnvironment) -> None:
    session = account.session()
    records = created(session, *[environment(session, stack="twenty", aux=False) for _ in range(20)])
    by_id = {record.id: instances(account, record)["primary"] for record in records}
    groups = {name: [g["GroupId"] for g in i["NetworkInterfaces"][0]["Groups"]] for name, i in by_id.items()}
    assert len({group for ids in groups.values() for group in ids}) == 20
    for name, instance in by_id.items():
        assert network_of(account, instance)["members"] == groups[name]
    zones = {instance["Placement"]["AvailabilityZone"] for instance in by_id.values()}
    assert len(zones) > 1
    assert len(list(session.home.stacks.glob("twenty*"))) == 1
    # EC2 reports that root has switched an instance off.
    off = ec2_backends[DEFAULT_ACCOUNT_ID][REGION].get_instance(by_id[records[0].id]["InstanceId"])
    off.stop()
    off.state_reason = StateReason("Instance initiated shutdown", "Client.InstanceInitiatedShutdown")
    assert [session.cloud.termination_reason(record, "primary").from_within for record in records[:2]] == [True, False]
    # A finished environment is destroyed alone; the others stay.
    destroy_machines(session, records[0])
    assert len(account.everything()["instances"]) == 19
    session.cloud.remove(records[1])
    destroy_machines(session, records[1])
    assert len(account.everything()["instances"]) == 18
    stack = stack_of(session, records[0])
    stack.remove({record.id for record in records}, session.progress.note)
    assert account.everything() == NOTHING


def test_the_network_is_found_by_tag_and_grows_at_its_state(api: FaultyApi, account: Account) -> None:
    region = "eu-west-1"
    first, second = account.session("first", (region,)), account.session("second", (region,))

    def create_network(session: Session) -> None:
        create_shared_network(session, account.record(session, region))

    create_network(first)
    for session in (first, account.session("first", (region,))):  # with what it knows already, and with nothing
        api.new.hide_again(3, "DescribeSubnets", "DescribeInternetGateways", "DescribeRouteTables")
        create_network(session)
    api.new.hide_again(3, "DescribeSubnets")
    assert len(Networks(Api(None, region), "").get(region).subnets["offline"]) >= 2
    create_network(second)
    ours = [{"Name": "tag:provisioner:network", "Values": [region]}]
    assert len(account.client(region=region).describe_vpcs(Filters=ours)["Vpcs"]) == 2
    assert not list(second.home.stacks.glob("network*"))

    stranger = account.session("third", (region,), controller_cidrs=("198.51.100.1/32",))
    with pytest.raises(HostError, match="created by another controller"):
        create_network(stranger)
    create_network(account.session("first", (region,), controller_cidrs=("198.51.100.1/32",)))
    network = find_network(Api(None, region), region, "")
    assert network is not None
    assert network.controllers == {CONTROLLER, "198.51.100.1/32"}
    assert len(network.subnets["offline"]) >= 2


def test_homes_that_made_a_network_at_once_each_use_their_own(
    account: Account, api: FaultyApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    region = "sa-east-1"
    sessions = [account.session(name, (region,)) for name in ("one", "two")]
    for session in sessions:
        with monkeypatch.context() as patch:
            patch.setattr(stacks, "find_network", lambda *_: None)
            create_shared_network(session, account.record(session, region))
    homes = [session.home.identity for session in sessions]
    networks = [find_network(Api(None, region), region, home) for home in homes]
    assert [network and network.home for network in networks] == homes
    other = find_network(Api(None, region), region, "")
    assert other in networks
    assert other == min(filter(None, networks), key=lambda network: min(network.vpcs.values()))
    api.new.hide_again(3, "DescribeSubnets")
    assert find_network(Api(None, region), region, homes[1]) is None  # nor another's, which does not let it in


def test_a_network_keeps_its_subnets_and_grows_to_every_zone(account: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    region = "ap-northeast-2"

    def subnets(controllers: tuple[str, ...]) -> dict[str, dict[str, str]]:
        session = account.session("one", (region,), controller_cidrs=controllers)
        create_shared_network(session, account.record(session, region))
        network = find_network(Api(None, region), region, session.home.identity)
        assert network is not None
        assert network.controllers == set(controllers)
        return network.subnets

    with monkeypatch.context() as patch:
        patch.setattr(stacks, "zones_of", lambda *_: [f"{region}{letter}" for letter in "bc"])
        before = subnets((CONTROLLER,))
    assert {zone[-1] for zone in before["offline"]} == {"b", "c"}
    after = subnets((CONTROLLER, "198.51.100.1/32"))
    zones = account.client(region=region).describe_availability_zones()["AvailabilityZones"]
    for kind, known in before.items():
        assert known.items() < after[kind].items()
        assert set(after[kind]) == {zone["ZoneName"] for zone in zones}


def test_a_machine_is_ended_before_the_schedule_that_would_end_it(
    account: Account, api: FaultyApi, environment: MakeEnvironment
) -> None:
    session = account.session()
    [record] = created(session, environment(session, aux=False))
    assert record.stack == record.id  # Terraform destroys it
    api.requests.clear()
    destroy_machines(session, record)
    actions = [request["Action"] for request in api.requests]
    [schedule] = [number for number, action in enumerate(actions) if action.startswith("DELETE /schedules/")]
    assert actions.index("TerminateInstances") < schedule
    [request, *_] = [request for request in api.requests if request["Action"] == "TerminateInstances"]
    assert request["SkipOsShutdown"] == "true"


def test_credentials_of_another_account_prove_nothing_gone(account: Account, environment: MakeEnvironment) -> None:
    session = account.session()
    [record] = created(session, environment(session, aux=False))
    elsewhere = session.environments.update(record, placement={**record.placement, "account": "210987654321"})
    with pytest.raises(StillThereError, match=f"is in the AWS account 210987654321, and these .* of {ACCOUNT}"):
        destroy_machines(session, elsewhere)
    unverified = session.environments.find(record.id)
    assert unverified.status == "unverified"
    assert instances(account, record)
    destroy_machines(session, session.environments.update(unverified, placement=record.placement))


def test_what_terraform_forgot_is_found_by_tag_and_removed(account: Account, environment: MakeEnvironment) -> None:
    session = account.session()
    [record] = created(session, environment(session))
    # As if Terraform had been killed during an apply: nothing in the state, everything in the account.
    (session.home.stacks / record.stack / "terraform.tfstate").unlink()
    destroy_machines(session, record)
    assert account.everything() == NOTHING
    assert any("Still there of" in note for note in account.progress.notes)
