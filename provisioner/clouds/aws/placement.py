"""Places environments in zones, and moves on to the next place when EC2 has no capacity."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Mapping, Sequence
from hashlib import sha256
from typing import Literal

from provisioner.base.errors import CapacityError, HostError, InfrastructureError, Setting, TerraformError
from provisioner.base.models import Environment, MachineSize
from provisioner.clouds.aws import cleanup
from provisioner.clouds.aws.api import LOGIN_HINT, NO_LOGIN, REFUSED, SESSION_ENDED, asking, rights_hint
from provisioner.clouds.aws.network import CONTROLLERS, allowlist_subnet
from provisioner.clouds.aws.sizing import UPGRADE_HINT, AwsSizing

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
    # Of the region's network (Amazon VPC user guide, "Amazon VPC quotas"): it takes two VPCs of five.
    "VpcLimitExceeded": ("region", "the account's quota of VPCs is used up"),
    "InternetGatewayLimitExceeded": ("region", "the account's quota of internet gateways is used up"),
    "RouteLimitExceeded": ("region", "the account's quota of routes in a route table is used up"),
}


# The provider repeats a request to which it got no answer. These codes then say that the first one had succeeded:
# only a lost answer explains that something exists already.
REPETITIONS = (
    "InvalidPermission.Duplicate", "InvalidGroup.Duplicate", "InvalidKeyPair.Duplicate", "RouteAlreadyExists",
    "Resource.AlreadyAssociated", "ConflictException",
)  # fmt: skip


# Faults of AWS's own, after the provider's repetitions (EC2 API reference, "Error codes": server errors). What was
# asked for may exist all the same: it is removed before anything is asked for again.
FAULTS = ("InternalError", "InternalFailure", "ServiceUnavailable", "Unavailable")


# What EC2 says of an instance that it ended at its launch (Amazon EC2 user guide, "Instance terminates immediately").
ENDED_AT_LAUNCH = "Client.InternalError"
# What EC2 says of an account of the free plan (AWS Billing user guide, "Free Tier": accounts since July 2025).
FREE_PLAN = "not eligible for Free Tier"
# What EC2 says of accounts that may not launch now -> (what is wrong, what to do, by which settings). Before they are
# taken for a lack of credentials (EC2 API reference, "Error codes"; EC2 user guide, "Service-linked role for Spot
# Instance requests").
ACCOUNT_PROBLEMS: dict[str, tuple[str, str, tuple[Setting, ...]]] = {
    "AuthFailure.ServiceLinkedRoleCreationNotPermitted": (
        "The account has no role for spot instances.",
        "Have an administrator run `provisioner aws setup` once, or do without spot instances.",
        ("spot",),
    ),
    "PendingVerification": (
        "AWS still verifies the account's use of this region.",
        "As a rule it takes some minutes, and at most four hours; AWS then writes to the account's owner. Try again "
        "then, or use another region.",
        ("region",),
    ),
    "OptInRequired": (
        "The account is not signed up for EC2.",
        "Its owner completes the registration, with a payment method, in the AWS console.",
        (),
    ),
    "Blocked": ("AWS has blocked the account.", "Its owner asks AWS Support.", ()),
}


def _is_said(code: str, said: str) -> bool:
    """Whether AWS's API says a code, or EC2 gives it as the reason of an instance's end.

    Not whether Terraform uses the word: it also says "Unsupported argument".
    """
    return bool(re.search(rf"\b(?:api error |Server\.|Client\.){re.escape(code)}\b", said))


def account_problem(said: str) -> tuple[str, str, tuple[Setting, ...]] | None:
    """Returns what is wrong with the account, what to do and by which settings; None for failures of other causes."""
    return next((explained for code, explained in ACCOUNT_PROBLEMS.items() if _is_said(code, said)), None)


def mishap(said: str) -> str:
    """Returns why what a failure left is removed and created again, once; empty for failures of other causes."""
    if any(_is_said(code, said) for code in REPETITIONS):
        return "AWS's answer was lost, and what it had created is in the way; creating it again"
    fault = next((code for code in FAULTS if _is_said(code, said)), "")
    return f"AWS had an error of its own ({fault}); creating it again" if fault else ""


def is_subnet_taken(said: str) -> bool:
    """Whether a failure says that another user's subnet, unseen until then, has the same addresses."""
    return _is_said("InvalidSubnet.Conflict", said)


def places(
    sizes: Mapping[str, MachineSize],
    zones: Sequence[str],
    *,
    spot: bool,
    offered: Mapping[str, Collection[str]] | None = None,
) -> list[dict[str, str]]:
    """Lists all places for an environment, the best first.

    Args:
        sizes: the machines by role, each with its types.
        zones: availability zones that have a subnet, the best first.
        spot: whether spot comes before on-demand.
        offered: the types that each zone offers. Zones that lack one come last: EC2 knows best.
    """
    places_in_order = []
    for market in ("spot", "on-demand") if spot else ("on-demand",):
        for rank in range(max(len(size.types) for size in sizes.values())):
            types = {role: size.types[min(rank, len(size.types) - 1)] for role, size in sizes.items()}
            places_in_order += [{"market": market, **types, "zone": zone} for zone in zones]

    def is_lacking(place: Mapping[str, str]) -> bool:
        return offered is not None and not {place[role] for role in sizes} <= {*offered.get(place["zone"], ())}

    return sorted(places_in_order, key=is_lacking)


def shortage(said: str) -> tuple[Level, str] | None:
    """Returns what has to change after a failure for want of capacity or quota, and an explanation to format.

    None if the failure has another cause.
    """
    return next((explained for code, explained in SHORTAGES.items() if _is_said(code, said)), None)


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
    changing = ("market",) if level == "market" else ("market", *roles)
    for place in all_places[position + 1 :]:
        if level == "zone" or any(place[name] != current[name] for name in changing):
            return place
    return None


class AwsPlacement(AwsSizing):
    """Zones, instance types and markets of one region, tried one after the other."""

    assigned_subnets: set[str]
    """Subnets that this process has given to environments with an allowlist."""
    repeated: set[str]
    """Environments whose creation was repeated after a mishap."""

    def place(self, environment: Environment) -> dict[str, str]:
        """Chooses the cheapest types in a zone; zones take turns from environment to environment."""
        return {**self._places(environment)[0], CONTROLLERS: " ".join(sorted(self.account.controllers))}

    def next_place(self, environment: Environment, error: TerraformError) -> tuple[str, dict[str, str]] | None:
        """Chooses the next zone, type or market, depending on what EC2 says it lacks.

        Raises:
            CapacityError: there is no other.
            HostError: AWS refuses these credentials, or the account may not launch such machines.
            InfrastructureError: the session of the credentials ended, and there is a new one.
        """
        self._require_permitted(environment, error)
        current = environment.placement
        if is_subnet_taken(error.said) and environment.allowed_destinations:
            # Another command has given it to an environment since this one looked.
            self.networks.forget(current["region"])
            subnet = self._free_subnet(environment, {*self.networks.get(current["region"]).taken, current["allowlist"]})
            return "another environment has taken its subnet; trying another", {**current, "allowlist": subnet}
        if (reason := mishap(error.said)) and environment.id not in self.repeated:
            self.repeated.add(environment.id)
            cleanup.remove(self.account.api, current["region"], environment.id, just_created=True)
            return reason, current
        lacking = shortage(error.said)
        if lacking is None:
            return None
        level, explanation = lacking
        reason = explanation.format(types=_types(current, environment), zone=current["zone"])
        following = next_place(self._places(environment), current, level, environment.roles)
        if following is None:
            raise CapacityError(
                f"{environment.id} could not be created: {reason}, and there is nothing else to try.",
                hint="Allow another region, widen the spec's ranges, or ask AWS for a larger quota.",
                settings=("region",),
                details=error.details,
            )
        where = f"{_types(following, environment)} in {following['zone']} ({following['market']})"
        return f"{reason}; trying {where}", {**following, CONTROLLERS: current.get(CONTROLLERS, "")}

    def explain_network_failure(self, environment: Environment, error: TerraformError) -> None:
        """Raises what EC2's refusal of the region's network means, if that is known.

        Raises:
            CapacityError: the account's quotas in the region have no room for it.
            HostError: AWS refuses these credentials or this account.
            InfrastructureError: the session of the credentials ended, and there is a new one.
        """
        self._require_permitted(environment, error)
        level, reason = shortage(error.said) or ("", "")
        if level == "region":
            raise CapacityError(
                f"The network in {environment.placement['region']} could not be created: {reason}.",
                hint="Allow another region, or ask AWS for a larger quota.",
                settings=("region",),
                details=error.details,
            ) from error

    def _require_permitted(self, environment: Environment, error: TerraformError) -> None:
        """Makes sure that a failure was not a refusal, which no other place would change.

        Notes that an account is on the free plan.

        Raises:
            HostError: AWS refuses these credentials, or the account may not launch such machines.
            InfrastructureError: the session of the credentials ended, and there is a new one.
        """
        if self.account.api.renews and (code := _said(SESSION_ENDED, error)):
            raise InfrastructureError(
                f"{error.message} The session of the AWS credentials ended while it ran: {code}.",
                hint="Try again: each command begins with credentials that last.",
                details=error.details,
            ) from error
        if problem := account_problem(error.said):
            what, hint, settings = problem
            raise HostError(f"{error.message} {what}", hint=hint, details=error.details, settings=settings) from error
        for codes, hint in ((REFUSED, rights_hint(error.said)), (NO_LOGIN, LOGIN_HINT)):
            if code := _said(codes, error):
                raise HostError(f"{error.message} AWS said {code}.", hint=hint, details=error.details) from error
        if FREE_PLAN in error.said:
            types = _types(environment.placement, environment)
            knew = self.is_on_free_plan
            self.note_free_plan()
            raise HostError(
                f"The AWS account is on the free plan, which does not include {types}.",
                hint=UPGRADE_HINT if knew else f"Try again: now only types of that plan are chosen. Or: {UPGRADE_HINT}",
                details=error.details,
            ) from error
        if ENDED_AT_LAUNCH in error.said:
            raise HostError(
                f"{error.message} EC2 ended the machine as it started it: {ENDED_AT_LAUNCH}.",
                hint="As a rule, the key of its disk cannot be used. If the region's default key for EBS is your own, "
                "these credentials need kms:CreateGrant, kms:Decrypt, kms:DescribeKey, kms:ReEncrypt* and "
                "kms:GenerateDataKeyWithoutPlaintext for it.",
                details=error.details,
            ) from error

    def _places(self, environment: Environment) -> list[dict[str, str]]:
        """All places for an environment, in the order in which they are tried."""
        region = environment.placement.get("region", self.account.region)
        zones = sorted(self.networks.zones(region))
        turn = int.from_bytes(sha256(environment.id.encode()).digest()[:2], "big") % len(zones)
        sizes = {str(role): machine.size for role, machine in environment.machines.items()}
        without_spot = {one.name for one in self.catalogue.types if not one.has_spot} if self.spot else set()
        # A spot instance cannot be stopped, and a builder must be.
        is_for_spot = without_spot.isdisjoint(name for size in sizes.values() for name in size.types)
        spot = self.spot and environment.kind == "task" and is_for_spot
        where = {
            "region": region,
            "account": self.account.identity.account,
            "profile": self.account.profile,
            "state": self.account.state,
        }
        if environment.allowed_destinations:  # its own subnet is chosen once and for all
            known = environment.placement.get("allowlist")
            where["allowlist"] = known or self._free_subnet(environment, self.networks.taken(region))
        offered = self._offered(region, frozenset(name for size in sizes.values() for name in size.types))
        in_order = places(sizes, zones[turn:] + zones[:turn], spot=spot, offered=offered)
        return [{**where, **place} for place in in_order]

    def _offered(self, region: str, types: frozenset[str]) -> dict[str, set[str]] | None:
        """Returns which of some types each zone of a region offers, as EC2 said just now; None if it does not say."""

        def ask() -> list[dict[str, str]]:
            filters = [{"Name": "instance-type", "Values": sorted(types)}]
            with asking("Asking which zones offer the instance types"):
                pages = self.account.api.client("ec2", region).get_paginator("describe_instance_type_offerings")
                found = pages.paginate(LocationType="availability-zone", Filters=filters)
                return [row for page in found for row in page["InstanceTypeOfferings"]]

        zones: dict[str, set[str]] = {}
        with contextlib.suppress(HostError, InfrastructureError):
            for row in self.account.answers.get(("offerings", region, types), ask):
                zones.setdefault(row["Location"], set()).add(row["InstanceType"])
        return zones or None

    def _free_subnet(self, environment: Environment, taken: Collection[str]) -> str:
        subnet = allowlist_subnet(environment.id, {*taken, *self.assigned_subnets})
        self.assigned_subnets.add(subnet)
        return subnet


def _said(codes: Sequence[str], error: TerraformError) -> str:
    """Returns the first of AWS's codes that is in an error; empty if none is."""
    return next((code for code in codes if re.search(rf"\b{code}\b", error.said)), "")


def _types(place: Mapping[str, str], environment: Environment) -> str:
    """The instance types of a place, in words."""
    return " and ".join(dict.fromkeys(place[role] for role in environment.machines))
