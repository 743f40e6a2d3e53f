"""What is refused as malformed is what botocore's models do not allow."""

from __future__ import annotations

import json

import pytest

from tests.aws.request_models import Defect, defect
from tests.aws.rights.calls import Call

TARGET = {"Arn": "arn:aws:scheduler:::aws-sdk:ec2:terminateInstances", "RoleArn": "arn:aws:iam::123456789012:role/a"}
SCHEDULE = {
    "FlexibleTimeWindow": {"Mode": "OFF"}, "ScheduleExpression": "at(2026-01-01T00:00:00)", "Target": TARGET,
}  # fmt: skip


@pytest.mark.parametrize(
    ("action", "parameters", "expected"),
    [
        ("DescribeVpcs", {"VpcId.1": "vpc-1", "Filter.1.Name": "state", "Filter.1.Value.1": "available"}, None),
        ("DescribeVpcs", {"VpcIds.1": "vpc-1"}, Defect("unknown", "VpcIds")),
        ("DescribeVpcs", {"VpcId.one": "vpc-1"}, Defect("unknown", "VpcId.one")),
        ("DescribeVpcs", {"DryRun": "maybe"}, Defect("value", "DryRun", "maybe")),
        ("DescribeVpcs", {"MaxResults": "4"}, Defect("value", "MaxResults", "4")),
        ("CreateSubnet", {"CidrBlock": "10.0.0.0/24"}, Defect("missing", "VpcId")),
        ("CreateSubnets", {}, Defect("action", "Action", "CreateSubnets")),
        (
            "CreateVpc", {"InstanceTenancy": "alone", "CidrBlock": "10.0.0.0/16"},
            Defect("value", "InstanceTenancy", "alone"),
        ),
        (
            "CreateNetworkAclEntry",
            {"NetworkAclId": "acl-1", "RuleNumber": "1", "Protocol": "-1", "RuleAction": "allow"},
            Defect("missing", "Egress"),
        ),
        (
            "CreateTags", {"ResourceId.1": "i-1", "Tag.1.Key": "a", "Tag.1.Name": "b"},
            Defect("unknown", "Tag.1.Name"),
        ),
    ],
    ids=[
        "all right", "unknown", "no number", "no boolean", "too few", "missing", "no such action", "no such value",
        "missing among many", "unknown inside",
    ],
)  # fmt: skip
def test_ec2(action: str, parameters: dict[str, str], expected: Defect | None) -> None:
    assert defect(Call("ec2", action, {"Version": "2016-11-15", **parameters}), {}, b"") == expected


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, None),
        ({"ClientToken": "t"}, None),
        ({"Name2": "x"}, Defect("unknown", "Name2")),
        ({"FlexibleTimeWindow": {"Mode": "NEVER"}}, Defect("value", "FlexibleTimeWindow.Mode", "NEVER")),
        ({"Target": {"Arn": "a"}}, Defect("missing", "Target.RoleArn")),
        ({"ActionAfterCompletion": "FORGET"}, Defect("value", "ActionAfterCompletion", "FORGET")),
    ],
    ids=["all right", "a token", "unknown", "no such value", "missing", "no such action"],
)
def test_schedules(change: dict[str, object], expected: Defect | None) -> None:
    environ = {"PATH_INFO": "/schedules/tests-main-abc.primary", "QUERY_STRING": ""}
    body = json.dumps({**SCHEDULE, **change}).encode()
    assert defect(Call("scheduler", "CreateSchedule", {}), environ, body) == expected


def test_a_name_in_a_path_has_a_pattern() -> None:
    environ = {"PATH_INFO": "/schedules/a b", "QUERY_STRING": ""}
    body = json.dumps(SCHEDULE).encode()
    assert defect(Call("scheduler", "CreateSchedule", {}), environ, body) == Defect("value", "Name", "a b")


def test_iam() -> None:
    given = {"RoleName": "provisioner-scheduler", "Tags.member.1.Key": "a", "Tags.member.1.Value": "b"}
    call = Call("iam", "CreateRole", {**given, "AssumeRolePolicyDocument": "{}"})
    assert defect(call, {}, b"") is None
    missing = defect(Call("iam", "CreateRole", given), {}, b"")
    assert missing == Defect("missing", "AssumeRolePolicyDocument")
    assert missing.code("iam") == "ValidationError"


def test_a_service_without_a_description_is_not_checked() -> None:
    assert defect(Call("s3", "GetObject", {"Bucket": "a", "Key": "b"}), {}, b"") is None
