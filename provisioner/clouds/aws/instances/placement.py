"""Places environments in zones, and moves on to the next place when EC2 has no capacity."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from hashlib import sha256

from provisioner.clouds.aws.account import Account
from provisioner.clouds.aws.api import LOGIN_HINT, NO_LOGIN, REFUSED, RIGHTS_HINT, SESSION_ENDED
from provisioner.clouds.aws.cleanup import tagged_resources
from provisioner.clouds.aws.instances import places
from provisioner.clouds.aws.network.admission import CONTROLLERS
from provisioner.clouds.aws.network.region import Networks, allowlist_subnet
from provisioner.clouds.defaults import Placement
from provisioner.errors import CapacityError, HostError, InfrastructureError, TerraformError
from provisioner.models import Environment


class AwsPlacement(Placement):
    """Zones, instance types and markets of one region, tried one after the other."""

    account: Account
    networks: Networks
    spot: bool
    assigned_subnets: set[str]
    """Subnets that this process has given to environments with an allowlist."""
    repeated: set[str]
    """Environments whose creation was repeated after AWS's answer was lost."""

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
        if places.is_subnet_taken(error.said) and environment.allowed_destinations:
            # Another command has given it to an environment since this one looked.
            self.networks.forget(current["region"])
            subnet = self._free_subnet(environment, {*self.networks.get(current["region"]).taken, current["allowlist"]})
            return "another environment has taken its subnet; trying another", {**current, "allowlist": subnet}
        if places.is_repetition(error.said) and environment.id not in self.repeated:
            self.repeated.add(environment.id)
            tagged_resources.remove(self.account.api, current["region"], environment.id, just_created=True)
            return "AWS's answer was lost, and what it had created is in the way; creating it again", current
        shortage = places.shortage(error.said)
        if shortage is None:
            return None
        level, explanation = shortage
        reason = explanation.format(types=_types(current, environment), zone=current["zone"])
        following = places.next_place(self._places(environment), current, level, environment.roles)
        if following is None:
            raise CapacityError(
                f"{environment.id} could not be created: {reason}, and there is nothing else to try.",
                hint="Allow another --region, widen the spec's ranges, or ask AWS for a larger quota.",
                details=error.details,
            )
        where = f"{_types(following, environment)} in {following['zone']} ({following['market']})"
        return f"{reason}; trying {where}", {**following, CONTROLLERS: current.get(CONTROLLERS, "")}

    def _require_permitted(self, environment: Environment, error: TerraformError) -> None:
        """Makes sure that a failure was not a refusal, which no other place would change.

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
        if problem := places.account_problem(error.said):
            raise HostError(f"{error.message} {problem[0]}", hint=problem[1], details=error.details) from error
        for codes, hint in ((REFUSED, RIGHTS_HINT), (NO_LOGIN, LOGIN_HINT)):
            if code := _said(codes, error):
                raise HostError(f"{error.message} AWS said {code}.", hint=hint, details=error.details) from error
        if places.FREE_PLAN in error.said:
            types = _types(environment.placement, environment)
            raise HostError(
                f"The AWS account is on the free plan, which does not include {types}.",
                hint="Upgrade the account to the paid plan (AWS console, Billing and Cost Management), or use another.",
                details=error.details,
            ) from error
        if places.ENDED_AT_LAUNCH in error.said:
            raise HostError(
                f"{error.message} EC2 ended the machine as it started it: {places.ENDED_AT_LAUNCH}.",
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
        # A spot instance cannot be stopped, and a builder must be.
        spot = self.spot and environment.kind == "task"
        sizes = {str(role): machine.size for role, machine in environment.machines.items()}
        where = {
            "region": region,
            "account": self.account.identity.account,
            "profile": self.account.profile,
            "state": self.account.state,
            **self._allowlist(environment, region),
        }
        return [{**where, **place} for place in places.places(sizes, zones[turn:] + zones[:turn], spot=spot)]

    def _allowlist(self, environment: Environment, region: str) -> dict[str, str]:
        """The environment's own subnet, chosen once and for all; nothing for an environment without an allowlist."""
        if not environment.allowed_destinations:
            return {}
        subnet = environment.placement.get("allowlist")
        if subnet is None:
            subnet = self._free_subnet(environment, self.networks.taken(region))
        return {"allowlist": subnet}

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
