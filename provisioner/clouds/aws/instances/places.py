"""Orders the places where an environment can be created, and picks the next one when EC2 lacks capacity. Pure.

A place is a zone, an instance type per role, and a market (spot or on-demand). Zones are tried first, then types, then
the on-demand market. Another region is tried only if the operator allows it (--region, more than once).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal

from provisioner.models import MachineSize

Level = Literal["zone", "type", "market", "region"]

# Error code -> (what has to change, explanation). EC2 API reference, "Error codes".
SHORTAGES: dict[str, tuple[Level, str]] = {
    "InsufficientInstanceCapacity": ("zone", "EC2 has no capacity for {types} in {zone}"),
    "UnfulfillableCapacity": ("zone", "EC2 has no capacity for {types} in {zone}"),
    "InsufficientHostCapacity": ("zone", "EC2 has no capacity for {types} in {zone}"),
    "InsufficientVolumeCapacity": ("zone", "EBS has no capacity for a volume in {zone}"),
    "Unsupported": ("zone", "{zone} does not offer {types}"),
    "VcpuLimitExceeded": ("market", "the account's quota of vCPUs is used up"),
    "InstanceLimitExceeded": ("type", "the account's quota is too small for {types}"),
    "MaxSpotInstanceCountExceeded": ("market", "the account's quota of spot instances is used up"),
    "SpotMaxPriceTooLow": ("market", "the spot price is above the on-demand price"),
    "InsufficientFreeAddressesInSubnet": ("zone", "the subnet in {zone} has no address left"),
    # Amazon VPC user guide, "Amazon VPC quotas": 200 of each in a VPC, and each environment with an allowlist has one.
    "SubnetLimitExceeded": ("region", "the account's quota of subnets in a VPC is used up"),
    "RouteTableLimitExceeded": ("region", "the account's quota of route tables in a VPC is used up"),
    "NetworkAclLimitExceeded": ("region", "the account's quota of network ACLs in a VPC is used up"),
    "SecurityGroupLimitExceeded": ("region", "the account's quota of security groups is used up"),
    "NetworkInterfaceLimitExceeded": ("region", "the account's quota of network interfaces is used up"),
    "VolumeLimitExceeded": ("region", "the account's quota of volumes is used up"),
    "MaxIOPSLimitExceeded": ("region", "the account's quota of volumes' operations a second is used up"),
    "InsufficientAddressCapacity": ("region", "EC2 has no public addresses left"),
}


# The provider repeats a request to which it got no answer. These codes then say that the first one had succeeded.
REPETITIONS = (
    "InvalidPermission.Duplicate", "InvalidGroup.Duplicate", "InvalidKeyPair.Duplicate", "RouteAlreadyExists",
    "Resource.AlreadyAssociated", "ConflictException",
)  # fmt: skip


# What EC2 says of an instance that it ended at its launch (Amazon EC2 user guide, "Instance terminates immediately").
ENDED_AT_LAUNCH = "Client.InternalError"
# What EC2 says of an account of the free plan (AWS Billing user guide, "Free Tier": accounts since July 2025).
FREE_PLAN = "not eligible for Free Tier"
# What EC2 says of accounts that may not launch now -> (what is wrong, what to do). Before they are taken for a lack of
# credentials (EC2 API reference, "Error codes"; EC2 user guide, "Service-linked role for Spot Instance requests").
ACCOUNT_PROBLEMS: dict[str, tuple[str, str]] = {
    "AuthFailure.ServiceLinkedRoleCreationNotPermitted": (
        "The account has no role for spot instances.",
        "Have an administrator run `provisioner aws setup` once, or leave --spot out.",
    ),
    "PendingVerification": (
        "AWS still verifies the account's use of this region.",
        "As a rule it takes some minutes, and at most four hours; AWS then writes to the account's owner. Try again "
        "then, or use another --region.",
    ),
    "OptInRequired": (
        "The account is not signed up for EC2.",
        "Its owner completes the registration, with a payment method, in the AWS console.",
    ),
    "Blocked": ("AWS has blocked the account.", "Its owner asks AWS Support."),
}


def _is_said(code: str, said: str) -> bool:
    """Whether AWS's API says a code, or EC2 gives it as the reason of an instance's end.

    Not whether Terraform uses the word: it also says "Unsupported argument".
    """
    return bool(re.search(rf"\b(?:api error |Server\.|Client\.){re.escape(code)}\b", said))


def account_problem(said: str) -> tuple[str, str] | None:
    """Returns what is wrong with the account, and what to do; None if a failure has another cause."""
    return next((explained for code, explained in ACCOUNT_PROBLEMS.items() if _is_said(code, said)), None)


def is_subnet_taken(said: str) -> bool:
    """Whether a failure says that another user's subnet, unseen until then, has the same addresses."""
    return _is_said("InvalidSubnet.Conflict", said)


def is_repetition(said: str) -> bool:
    """Whether a failure says that something exists already, which only a lost answer explains."""
    return any(_is_said(code, said) for code in REPETITIONS)


def places(sizes: Mapping[str, MachineSize], zones: Sequence[str], *, spot: bool) -> list[dict[str, str]]:
    """Lists all places for an environment, the best first.

    Args:
        sizes: the machines by role, each with its types.
        zones: availability zones that have a subnet, the best first.
        spot: whether spot comes before on-demand.
    """
    places_in_order = []
    for market in ("spot", "on-demand") if spot else ("on-demand",):
        for rank in range(max(len(size.types) for size in sizes.values())):
            types = {role: size.types[min(rank, len(size.types) - 1)] for role, size in sizes.items()}
            places_in_order += [{"market": market, **types, "zone": zone} for zone in zones]
    return places_in_order


def shortage(said: str) -> tuple[Level, str] | None:
    """Returns what has to change after a failure for want of capacity or quota, and an explanation to format.

    None if the failure has another cause.
    """
    for code, explained in SHORTAGES.items():
        if _is_said(code, said):
            return explained
    return None


def next_place(
    all_places: Sequence[dict[str, str]], current: Mapping[str, str], level: Level, roles: Sequence[str]
) -> dict[str, str] | None:
    """Returns the first place after the current one that differs in what has to change; None if there is none.

    Args:
        roles: of the environment's machines.
    """
    if level == "region":
        return None
    position = next(
        (index for index, place in enumerate(all_places) if place.items() <= current.items()), len(all_places)
    )
    for place in all_places[position + 1 :]:
        if level == "zone" or _besides_zone(place, level, roles) != _besides_zone(current, level, roles):
            return place
    return None


def _besides_zone(place: Mapping[str, str], level: Level, roles: Sequence[str]) -> tuple[str, ...]:
    if level == "market":
        return (place["market"],)
    return tuple(place[role] for role in ("market", *roles))
