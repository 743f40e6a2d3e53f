"""Where an environment goes when EC2 lacks something."""

from __future__ import annotations

import pytest
from botocore.exceptions import ClientError

from provisioner.base.errors import InfrastructureError, ThrottledError
from provisioner.base.models import MachineSize
from provisioner.clouds.aws.api import asking
from provisioner.clouds.aws.placement import (
    Level,
    account_problem,
    is_subnet_taken,
    mishap,
    next_place,
    places,
    shortage,
)
from provisioner.terraform.process import Transcript

ZONES = ["a", "b"]


def size(*types: str) -> MachineSize:
    return MachineSize(cpus=2, memory_gib=2, disk_gib=16, types=types)


def short(found: list[dict[str, str]]) -> list[str]:
    return [" ".join(one.values()) for one in found]


def test_zones_come_before_types_and_spot_before_on_demand() -> None:
    assert short(places({"primary": size("s", "m")}, ZONES, spot=True)) == [
        "spot s a", "spot s b", "spot m a", "spot m b",
        "on-demand s a", "on-demand s b", "on-demand m a", "on-demand m b",
    ]  # fmt: skip


def test_zones_that_do_not_offer_a_type_come_last() -> None:
    offered = {"a": {"s"}, "b": {"s", "m"}}
    assert short(places({"primary": size("m", "s")}, ["a", "b", "c"], spot=False, offered=offered)) == [
        "on-demand m b", "on-demand s a", "on-demand s b", "on-demand m a", "on-demand m c", "on-demand s c",
    ]  # fmt: skip


def test_both_machines_move_together() -> None:
    found = places({"primary": size("s"), "aux": size("s", "m")}, ["a"], spot=False)
    assert short(found) == ["on-demand s s a", "on-demand s m a"]


@pytest.mark.parametrize(
    ("at", "level", "then"),
    [(0, "zone", "spot s b"), (1, "zone", "spot m a"), (0, "type", "spot m a"), (0, "market", "on-demand s a"),
     (3, "zone", "on-demand s a"), (6, "type", None), (7, "zone", None), (4, "market", None), (0, "region", None)],
)  # fmt: skip
def test_what_has_to_change_changes(at: int, level: Level, then: str | None) -> None:
    found = places({"primary": size("s", "m")}, ZONES, spot=True)
    # The record says more than the place: region, account.
    following = next_place(found, {**found[at], "region": "eu-west-1"}, level, ("primary",))
    assert (" ".join(following.values()) if following else None) == then


@pytest.mark.parametrize(
    ("said", "level"),
    [
        ("api error InsufficientInstanceCapacity: We currently do not have sufficient t3.small capacity", "zone"),
        ("api error VcpuLimitExceeded: You have requested more vCPU capacity", "market"),
        ("api error MaxSpotInstanceCountExceeded: Max spot instance count exceeded", "market"),
        ("api error Unsupported: The requested configuration is currently not supported", "zone"),
        ("unexpected state 'terminated', last error: Server.InsufficientInstanceCapacity: no capacity", "zone"),
        ("api error SubnetLimitExceeded: The maximum number of subnets has been reached.", "region"),
        ("unexpected state 'terminated', last error: Client.VolumeLimitExceeded: Volume limit exceeded", "region"),
        ("unexpected state 'terminated', last error: Server.InsufficientVolumeCapacity: no capacity", "zone"),
        ("api error MaxIOPSLimitExceeded: You have reached the limit on your IOPS usage", "region"),
        ("api error NetworkInterfaceLimitExceeded: The maximum number of interfaces is reached", "region"),
        ("api error InsufficientAddressCapacity: Not enough available addresses", "region"),
        ("api error InsufficientFreeAddressesInSubnet: There are not enough free addresses", "zone"),
        ("api error VpcLimitExceeded: The maximum number of VPCs has been reached.", "region"),
        ("api error InternetGatewayLimitExceeded: The maximum number has been reached.", "region"),
        ("api error RouteLimitExceeded: The maximum number of routes has been reached.", "region"),
        ("api error UnsupportedOperation: no", None),
        # Terraform's own words: 1.9 does not know `use_lockfile`.
        ('Unsupported argument\nAn argument named "use_lockfile" is not expected here.', None),
        ("Unsupported Terraform Core version", None),
        ("api error UnauthorizedOperation: You are not authorized", None),
        ("", None),
    ],
)
def test_capacity_and_quota_are_told_from_other_failures(said: str, level: Level | None) -> None:
    found = shortage(said)
    assert (found[0] if found else None) == level


@pytest.mark.parametrize(
    ("said", "problem", "remedy"),
    [
        (
            "api error AuthFailure.ServiceLinkedRoleCreationNotPermitted: The provided credentials do not have "
            "permission to create the service-linked role for EC2 Spot Instances.",
            "no role for spot instances",
            "aws setup",
        ),
        (
            "api error PendingVerification: Your request for accessing resources in this region",
            "verifies",
            "another region",
        ),
        ("api error OptInRequired: You are not subscribed to this service.", "not signed up", "console"),
        ("api error Blocked: This account is currently blocked", "blocked", "Support"),
        ("api error AuthFailure: AWS was not able to validate the provided access credentials", "", ""),
        ("An argument is Blocked", "", ""),
    ],
    ids=["spot-role", "verification", "sign-up", "blocked", "login", "other-words"],
)
def test_missing_rights_are_told_from_missing_credentials(said: str, problem: str, remedy: str) -> None:
    found = account_problem(said)
    assert bool(found) == bool(problem)
    if found:
        assert problem in found[0]
        assert remedy in found[1]


@pytest.mark.parametrize(
    ("code", "by_terraform", "by_boto3"),
    [
        ("InsufficientVolumeCapacity", "elsewhere", "told"),
        ("VcpuLimitExceeded", "elsewhere", "told"),
        ("RequestLimitExceeded", "later", "throttled"),
        ("InternalError", "again", "told"),
        ("Unavailable", "again", "told"),
    ],
)
def test_every_refusal_of_ec2s_has_an_answer(code: str, by_terraform: str, by_boto3: str) -> None:
    for action in ("RunInstances", "CreateRoute"):
        said = f"operation error EC2: {action}, https response error, api error {code}: x"
        transcript = Transcript(lambda _: None, "terraform")
        transcript.add({"diagnostic": {"severity": "error", "summary": said, "detail": ""}})
        answers = {"later": transcript.passing, "elsewhere": shortage(said), "again": mishap(said)}
        assert [name for name, answer in answers.items() if answer] == [by_terraform]
    with pytest.raises(InfrastructureError, match=code) as caught, asking("Creating an image"):
        raise ClientError({"Error": {"Code": code, "Message": "x"}}, "CreateImage")
    assert isinstance(caught.value, ThrottledError) == (by_boto3 == "throttled")


def test_what_ec2_ends_at_launch_by_its_own_fault_is_created_again() -> None:
    assert "InternalError" in mishap("unexpected state 'terminated', last error: Server.InternalError: on launch")
    assert "lost" in mishap("api error InvalidGroup.Duplicate: exists")
    assert mishap("api error InvalidParameterValue: InternalError") == ""


def test_a_subnet_conflict_is_told_from_other_failures() -> None:
    conflict = "api error InvalidSubnet.Conflict: The CIDR '10.215.128.0/28' conflicts with another subnet"
    assert is_subnet_taken(conflict)
    assert not is_subnet_taken("api error InvalidSubnet.Range: The CIDR is invalid")
