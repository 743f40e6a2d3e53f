"""The IAM policy and the command that prints it; user data."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from provisioner.base.errors import UsageError
from provisioner.clouds.aws.images import VENDORS
from provisioner.clouds.aws.machines import cloud_config
from provisioner.clouds.aws.rights import Part, policy
from provisioner.clouds.aws.schedules import role_arn
from tests.unit.conftest import CommandLine

PARTS: tuple[Part, ...] = ("launch", "manage")


def statements(state: str = "") -> dict[str, dict[str, object]]:
    return {one["Sid"]: one for part in PARTS for one in policy(part, state)["Statement"]}


def test_a_policy_that_is_too_long_is_refused() -> None:
    with pytest.raises(UsageError, match="IAM takes 6144"):
        policy("launch", "", [f"eu-west-{number}" for number in range(30)])


def test_what_changes_or_removes_needs_our_tag() -> None:
    found = statements()
    assert found["ChangeOurs"]["Condition"] == {"Null": {"aws:ResourceTag/provisioner:owner": "false"}}
    actions = {action for one in found.values() for action in one["Action"]}  # type: ignore[attr-defined]
    assert not any(action.endswith(":*") for action in actions)
    conditioned = set(found["ChangeOurs"]["Action"])  # type: ignore[call-overload]
    for action in ("ec2:TerminateInstances", "ec2:DeleteVolume", "ec2:DeregisterImage", "ec2:DeleteSnapshot"):
        assert action in conditioned


def test_machines_start_from_our_images_and_the_distributions_alone() -> None:
    owners = sorted({owner for owner, *_ in VENDORS.values()})
    assert statements()["LaunchVendors"]["Condition"] == {"StringEquals": {"ec2:Owner": owners}}
    assert statements()["SchedulerRole"]["Resource"] == role_arn("*")


def test_state_in_s3_opens_its_prefix_alone() -> None:
    assert "State" not in statements()
    assert statements("s3://bucket/team/")["State"]["Resource"] == "arn:aws:s3:::bucket/team/*"


def test_the_command_prints_it(provisioner: CommandLine) -> None:
    for part in (*PARTS, "setup"):
        shown = provisioner("aws", "policy", part)
        assert shown.code == 0
        assert json.loads(shown.stdout)["Version"] == "2012-10-17"
    limited = provisioner("aws", "policy", "launch", "--region", "eu-west-1", "--type", "t3*").stdout
    assert '"aws:RequestedRegion"' in limited
    assert '"t3*"' in limited


@pytest.mark.parametrize(
    "arguments",
    [(), ("all",), ("manage", "--region", "eu-west-1"), ("setup", "--type", "t3*"), ("launch", "--type", "T3 x"),
     ("launch", "--region", "${file}")],
    ids=" ".join,
)  # fmt: skip
def test_limits_that_limit_nothing_are_refused(provisioner: CommandLine, arguments: tuple[str, ...]) -> None:
    assert provisioner("aws", "policy", *arguments).code == 2


def test_places_of_aws_are_none_of_the_local_clouds(provisioner: CommandLine) -> None:
    for arguments in (("--region", "eu-west-1"), ("--spot",)):
        refused = provisioner("doctor", *arguments)
        assert (refused.code, "the cloud aws" in refused.stderr) == (2, True)
    assert provisioner("doctor", "--cloud", "aws", "--region", "${file}").code == 2


def test_user_data_is_cloud_config_and_keeps_any_text() -> None:
    key = 'ssh-ed25519 AAAA "quoted" ${x} #\n'
    head, _, body = cloud_config("aux", {"admin": key}, datetime(2026, 1, 2, tzinfo=UTC)).partition("\n")
    assert head == "#cloud-config"
    told = json.loads(body)
    assert told["write_files"][0]["content"] == key
    assert told["bootcmd"][0][-2:] == ["ttl", "1767312000"]
    assert (told["hostname"], told["users"], told["disable_root"]) == ("aux", [], False)
