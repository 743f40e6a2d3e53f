"""Both accounts of the tests refuse what AWS refuses: the one without machines, and the one of tests/aws/ec2."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from tests.aws.account import REGION
from tests.aws.ec2.server import AMIS_VARIABLE, DEBIAN_AMI_ID, Settings
from tests.aws.new_resources import SECONDS_VARIABLE
from tests.aws.proxy import FaultyApi
from tests.aws.rights.judge import INSPECTOR, inspector
from tests.command_line import ROOT

AMI = "ami-nobody-has-a-disk-of-it"
UNSEEN_SECONDS = 4.0


@contextlib.contextmanager
def serving_with_machines(directory: Path) -> Iterator[str]:
    """Serves the account that has machines, and yields its URL. It has no disk from which one could start."""
    settings = Settings(str(directory), str(directory), "203.0.113.10", {}, silent_when_off=False)
    environment = {name: value for name, value in os.environ.items() if name != AMIS_VARIABLE}
    environment |= {SECONDS_VARIABLE: str(UNSEEN_SECONDS)}
    with subprocess.Popen(
        [sys.executable, "-m", "tests.aws.ec2.server", json.dumps(asdict(settings))],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=environment,
    ) as server:  # fmt: skip
        assert server.stdin
        assert server.stdout
        yield f"http://127.0.0.1:{json.loads(server.stdout.readline())['port']}"
        server.stdin.close()


@pytest.fixture(scope="module", params=["without machines", "with machines"])
def url(request: pytest.FixtureRequest, api: FaultyApi, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Returns the URL of each account in turn."""
    if request.param == "with machines":
        with serving_with_machines(tmp_path_factory.mktemp("server")) as served:
            yield served
        return
    api.reset()
    api.new.seconds = UNSEEN_SECONDS
    yield api.url
    api.reset()


def operator(url: str, service: str = "ec2", region: str = REGION) -> Any:
    """Returns a client whose calls are judged, sent unchecked, and not repeated."""
    return boto3.client(
        service, endpoint_url=url, region_name=region, aws_access_key_id="testing", aws_secret_access_key="testing",
        config=Config(retries={"total_max_attempts": 1}, parameter_validation=False),
    )  # fmt: skip


def code(error: pytest.ExceptionInfo[ClientError]) -> str:
    return str(error.value.response["Error"]["Code"])


def test_launches_beyond_the_rate_are_refused_in_one_region(url: str) -> None:
    busy, idle = (operator(url, region=region) for region in ("eu-west-2", "eu-west-1"))

    def launch(ec2: Any) -> str:
        with pytest.raises(ClientError) as refused:
            ec2.run_instances(ImageId=AMI, MinCount=1, MaxCount=1, DryRun=True)
        return code(refused)

    codes = [launch(busy)]
    while codes[-1] != "RequestLimitExceeded" and len(codes) < 200:
        codes.append(launch(busy))
    assert len(codes) > 5
    assert codes[-1] == "RequestLimitExceeded"
    assert launch(idle) != "RequestLimitExceeded"


def test_a_bucket_of_another_region_is_not_there(url: str) -> None:
    name = f"tests-{uuid.uuid4()}"
    inspector(url, "s3", "eu-west-1").create_bucket(
        Bucket=name, CreateBucketConfiguration={"LocationConstraint": "eu-west-1"}
    )
    client = inspector(url, "s3")
    statuses: list[int] = []
    client.meta.events.register(
        "response-received.s3", lambda response_dict, **_: statuses.append(response_dict["status_code"])
    )
    client.list_objects_v2(Bucket=name)  # which follows to where it is sent
    assert statuses[0] == 301
    assert statuses[-1] == 200
    inspector(url, "s3", "eu-west-1").delete_bucket(Bucket=name)


@pytest.fixture
def vpc(url: str) -> Iterator[str]:
    """Creates a VPC."""
    ec2 = inspector(url, "ec2")
    name = ec2.create_vpc(CidrBlock="10.99.0.0/16")["Vpc"]["VpcId"]
    yield name
    ec2.delete_vpc(VpcId=name)


def test_an_acl_holds_20_rules(url: str, vpc: str) -> None:
    ec2 = inspector(url, "ec2")
    acl = ec2.create_network_acl(VpcId=vpc)["NetworkAcl"]["NetworkAclId"]
    rule: dict[str, Any] = {"NetworkAclId": acl, "Protocol": "-1", "RuleAction": "allow", "CidrBlock": "10.0.0.0/8"}
    for number in range(1, 20):  # the last is the one that denies the rest
        ec2.create_network_acl_entry(**rule, RuleNumber=number, Egress=False)
    with pytest.raises(ClientError) as refused:
        ec2.create_network_acl_entry(**rule, RuleNumber=20, Egress=False)
    assert code(refused) == "NetworkAclEntryLimitExceeded"
    ec2.create_network_acl_entry(**rule, RuleNumber=20, Egress=True)
    ec2.delete_network_acl(NetworkAclId=acl)


@pytest.mark.parametrize("way", ["in", "out"])
def test_a_group_holds_60_rules_each_way(url: str, vpc: str, way: str) -> None:
    ec2 = inspector(url, "ec2")
    group = ec2.create_security_group(GroupName="tests", Description="tests", VpcId=vpc)["GroupId"]
    authorize = {"in": ec2.authorize_security_group_ingress, "out": ec2.authorize_security_group_egress}[way]

    def add(*numbers: int) -> None:
        ranges = [{"CidrIp": f"192.0.2.{number}/32"} for number in numbers]
        rule = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": ranges}
        authorize(GroupId=group, IpPermissions=[rule])

    present = {"in": 0, "out": 1}[way]  # AWS adds one that lets everything out
    add(*range(1, 60 - present))
    add(100)
    with pytest.raises(ClientError) as refused:
        add(101)
    assert code(refused) == "RulesPerSecurityGroupLimitExceeded"
    ec2.delete_security_group(GroupId=group)


def test_a_root_volume_is_no_smaller_than_the_image(url: str) -> None:
    images = inspector(url, "ec2").describe_images(Owners=["136693071363", "amazon"])["Images"]
    image = next((one for one in images if one["ImageId"] == DEBIAN_AMI_ID), images[0])
    disk = {"DeviceName": image["RootDeviceName"], "Ebs": {"VolumeSize": 1}}
    with pytest.raises(ClientError) as refused:
        inspector(url, "ec2").run_instances(
            ImageId=image["ImageId"], MinCount=1, MaxCount=1, BlockDeviceMappings=[disk]
        )
    assert code(refused) == "InvalidBlockDeviceMapping"


def test_an_account_has_a_quota_of_vcpus(url: str) -> None:
    with pytest.raises(ClientError) as refused:
        inspector(url, "ec2").run_instances(ImageId=AMI, MinCount=100, MaxCount=100, InstanceType="m5.24xlarge")
    assert code(refused) == "VcpuLimitExceeded"


def test_a_spot_instance_has_a_request(url: str) -> None:
    ec2 = inspector(url, "ec2")
    [instance] = ec2.run_instances(ImageId=AMI, MinCount=1, MaxCount=1, InstanceMarketOptions={"MarketType": "spot"})[
        "Instances"
    ]
    requests = ec2.describe_spot_instance_requests()["SpotInstanceRequests"]  # those of earlier tests, too
    ec2.terminate_instances(InstanceIds=[instance["InstanceId"]])
    assert [request["InstanceId"] for request in requests].count(instance["InstanceId"]) == 1


@pytest.mark.parametrize(
    ("action", "parameters", "expected"),
    [
        ("describe_vpcs", {"Filters": [{"Name": "state", "Values": ["available"]}]}, ""),
        ("describe_instances", {"MaxResults": "many"}, "InvalidParameterValue"),
        ("create_subnet", {"CidrBlock": "10.0.0.0/24"}, "MissingParameter"),
        (
            "run_instances",
            {"ImageId": AMI, "MinCount": 1, "MaxCount": 1, "MetadataOptions": {"HttpTokens": "needed"}},
            "InvalidParameterValue",
        ),
    ],
    ids=["all right", "a text for a number", "no VPC", "no such value"],
)
def test_a_request_has_the_form_that_aws_describes(
    url: str, action: str, parameters: dict[str, Any], expected: str
) -> None:
    if not expected:
        getattr(operator(url), action)(**parameters)
        return
    with pytest.raises(ClientError) as refused:
        getattr(operator(url), action)(**parameters)
    assert code(refused) == expected


def shown(describe: Callable[[], Any]) -> Any:
    """Asks until the account shows something, and returns that."""
    deadline = time.monotonic() + 60
    while not (answer := describe()):
        assert time.monotonic() < deadline
        time.sleep(0.5)
    return answer


def test_a_new_resource_is_unknown_for_some_seconds(url: str, vpc: str) -> None:
    administrator, ec2 = inspector(url, "ec2"), operator(url)
    subnet = administrator.create_subnet(VpcId=vpc, CidrBlock="10.99.1.0/24")["Subnet"]["SubnetId"]
    inside = [{"Name": "vpc-id", "Values": [vpc]}]
    with pytest.raises(ClientError) as refused:
        ec2.describe_subnets(SubnetIds=[subnet])
    assert code(refused) == "InvalidSubnetID.NotFound"
    assert ec2.describe_subnets(Filters=inside)["Subnets"] == []
    [seen] = shown(lambda: ec2.describe_subnets(Filters=inside)["Subnets"])
    assert seen["SubnetId"] == subnet
    other = administrator.create_subnet(VpcId=vpc, CidrBlock="10.99.2.0/24")["Subnet"]["SubnetId"]
    assert [one["SubnetId"] for one in ec2.describe_subnets(Filters=inside)["Subnets"]] == [subnet]
    for name in (subnet, other):
        administrator.delete_subnet(SubnetId=name)


def test_a_new_instance_is_unknown_for_some_seconds(url: str) -> None:
    administrator, ec2 = inspector(url, "ec2"), operator(url)
    tags = [{"Key": "provisioner:owner", "Value": "tests"}, {"Key": "tests", "Value": uuid.uuid4().hex}]
    [instance] = administrator.run_instances(
        ImageId=AMI, MinCount=1, MaxCount=1, TagSpecifications=[{"ResourceType": "instance", "Tags": tags}]
    )["Instances"]
    ours = [{"Name": "tag:tests", "Values": [tags[1]["Value"]]}]
    assert ec2.describe_instances(Filters=ours)["Reservations"] == []
    with pytest.raises(ClientError) as refused:
        ec2.terminate_instances(InstanceIds=[instance["InstanceId"]])
    assert code(refused) == "InvalidInstanceID.NotFound"
    [reservation] = shown(lambda: ec2.describe_instances(Filters=ours)["Reservations"])
    assert reservation["Instances"][0]["InstanceId"] == instance["InstanceId"]
    assert reservation["Instances"][0]["State"]["Name"] != "terminated"
    administrator.terminate_instances(InstanceIds=[instance["InstanceId"]])


def test_an_ended_instance_is_forgotten_after_its_time(api: FaultyApi) -> None:
    ec2 = inspector(api.url, "ec2")
    names = [ec2.run_instances(ImageId=AMI, MinCount=1, MaxCount=1)["Instances"][0]["InstanceId"] for _ in range(2)]
    ec2.terminate_instances(InstanceIds=names[:1])
    assert ec2.terminate_instances(InstanceIds=names[:1])["TerminatingInstances"]  # no error while it is known
    api.modes.forgets_after_seconds = 0.5
    time.sleep(0.6)
    with pytest.raises(ClientError) as refused:
        ec2.terminate_instances(InstanceIds=names)
    assert code(refused) == "InvalidInstanceID.NotFound"
    [reservation] = ec2.describe_instances(InstanceIds=names[1:])["Reservations"]
    assert reservation["Instances"][0]["State"]["Name"] == "running"  # all or nothing
    api.reset()
    ec2.terminate_instances(InstanceIds=names[1:])


def test_an_account_of_the_free_plan_launches_some_types_only(api: FaultyApi) -> None:
    ec2 = inspector(api.url, "ec2")
    api.modes.free_plan = True
    with pytest.raises(ClientError) as refused:
        ec2.run_instances(ImageId=AMI, MinCount=1, MaxCount=1, InstanceType="m5.large")
    assert code(refused) == "InvalidParameterCombination"
    [instance] = ec2.run_instances(ImageId=AMI, MinCount=1, MaxCount=1, InstanceType="t3.small")["Instances"]
    ec2.terminate_instances(InstanceIds=[instance["InstanceId"]])
    api.reset()


def test_an_instance_whose_disk_has_a_closed_key_ends(api: FaultyApi) -> None:
    ec2 = inspector(api.url, "ec2")
    api.modes.without_key = True
    [instance] = ec2.run_instances(ImageId=AMI, MinCount=1, MaxCount=1)["Instances"]
    [reservation] = ec2.describe_instances(InstanceIds=[instance["InstanceId"]])["Reservations"]
    [ended] = reservation["Instances"]
    assert (ended["State"]["Name"], ended["StateReason"]["Code"]) == ("terminated", "Client.InternalError")
    api.reset()


@pytest.mark.parametrize(
    ("service", "call", "expected"),
    [
        ("ec2", "describe_vpcs", "RequestExpired"),
        ("iam", "list_roles", "ExpiredToken"),
        ("s3", "list_buckets", "ExpiredToken"),
        ("scheduler", "list_schedules", "ExpiredTokenException"),
        ("sts", "get_caller_identity", "ExpiredToken"),
    ],
)
def test_an_ended_session_is_refused_in_each_services_words(
    api: FaultyApi, service: str, call: str, expected: str
) -> None:
    def ask(token: str) -> None:
        client = boto3.client(
            service, endpoint_url=api.url, region_name=REGION, aws_access_key_id=INSPECTOR,
            aws_secret_access_key="testing", aws_session_token=token,
        )  # fmt: skip
        getattr(client, call)()

    api.ended.add("old")
    ask("new")
    with pytest.raises(ClientError) as refused:
        ask("old")
    assert code(refused) == expected
    api.reset()
