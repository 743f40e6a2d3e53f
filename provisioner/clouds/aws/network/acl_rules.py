"""How many rules the network ACLs of a region hold, which number each has, and what does not fit.

An ACL has 20 rules in each direction by default, with the last one that denies the rest (Amazon VPC user guide, "Amazon
VPC quotas": Rules per network ACL).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from provisioner.clouds.aws.api import Api, asking
from provisioner.errors import HostError, InfrastructureError, UsageError

DEFAULT = 20
SERVICE, QUOTA = "vpc", "L-2AEEBF1A"
# The last one, and in the shared ACL the one for neighbours.
DENIES = 1
NEIGHBOURS = 1
FIRST_NUMBER = 100
# In the ACL of an environment with an allowlist, as terraform/aws/environment numbers it.
FIRST_OF_ALLOWLIST = 200


def fits(api: Api, region: str, rules: int) -> bool:
    """Whether an ACL of a region holds so many rules. AWS is asked only about more than the default."""
    return rules <= DEFAULT or rules <= _quota(api, region)


def require_room(api: Api, region: str, controllers: int, destinations: int) -> None:
    """Makes sure that an environment's own ACL holds its allowlist.

    Args:
        controllers: how many networks controllers have there.
        destinations: how many pairs of network and port are allowed.

    Raises:
        UsageError: it does not.
    """
    rules = controllers + destinations + DENIES
    if not fits(api, region, rules):
        raise UsageError(
            f"An allowlist of {destinations} addresses does not fit a network ACL in {region}: with {controllers} for "
            f"controllers it needs {rules} rules, and the account's quota is {_quota(api, region)}.",
            hint="A name counts once for each of its addresses. Allow fewer, or ask AWS for a larger quota (Service "
            "Quotas, Amazon VPC: Rules per network ACL).",
        )


def room(api: Api, region: str, controllers: int) -> int:
    """Returns how many pairs of network and port an environment's own ACL holds."""
    return max(0, _quota(api, region) - controllers - DENIES)


def shared_rules(controllers: Collection[str]) -> int:
    """How many rules the ACL that environments share has in each direction."""
    return len(controllers) + NEIGHBOURS + DENIES


def numbered(controllers: Collection[str], known: Mapping[str, int]) -> dict[str, int]:
    """Gives each controller's network the number of its rules. Those that have one keep it, and lose no packet. Pure.

    Args:
        known: the numbers that are in force.
    """
    kept = {cidr: number for cidr, number in known.items() if cidr in controllers}
    free = (number for number in range(FIRST_NUMBER, 1 << 15) if number not in kept.values())
    return kept | {cidr: next(free) for cidr in sorted(controllers) if cidr not in kept}


def _quota(api: Api, region: str) -> int:
    """The account's quota; the default if AWS does not say."""
    try:
        with asking("Asking for the quota of network ACLs"):
            answer = api.client("service-quotas", region).get_service_quota(ServiceCode=SERVICE, QuotaCode=QUOTA)
        return int(answer["Quota"]["Value"])
    except (HostError, InfrastructureError, UsageError):
        return DEFAULT
