"""Orders the places where an environment can be created, and picks the next one when EC2 lacks capacity. Pure.

A place is a zone, an instance type per role, and a market (spot or on-demand). Zones are tried first, then types, then
the on-demand market. Another region is tried only if the operator allows it (--region, more than once).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal

from provisioner.models import MachineSize

Level = Literal["zone", "type", "market"]

# Error code -> (what has to change, explanation). EC2 API reference, "Error codes".
SHORTAGES: dict[str, tuple[Level, str]] = {
    "InsufficientInstanceCapacity": ("zone", "EC2 has no capacity for {types} in {zone}"),
    "UnfulfillableCapacity": ("zone", "EC2 has no capacity for {types} in {zone}"),
    "InsufficientHostCapacity": ("zone", "EC2 has no capacity for {types} in {zone}"),
    "Unsupported": ("zone", "{zone} does not offer {types}"),
    "VcpuLimitExceeded": ("market", "the account's quota of vCPUs is used up"),
    "InstanceLimitExceeded": ("type", "the account's quota is too small for {types}"),
    "MaxSpotInstanceCountExceeded": ("market", "the account's quota of spot instances is used up"),
    "SpotMaxPriceTooLow": ("market", "the spot price is above the on-demand price"),
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


def _is_said(code: str, said: str) -> bool:
    """Whether AWS's API says a code, or EC2 gives it as the reason of an instance's end.

    Not whether Terraform uses the word: it also says "Unsupported argument".
    """
    return bool(re.search(rf"\b(?:api error |Server\.|Client\.){re.escape(code)}\b", said))


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


def next_place(all_places: Sequence[dict[str, str]], current: Mapping[str, str], level: Level) -> dict[str, str] | None:
    """Returns the first place after the current one that differs in what has to change; None if there is none."""
    position = next(
        (index for index, place in enumerate(all_places) if place.items() <= current.items()), len(all_places)
    )
    for place in all_places[position + 1 :]:
        if level == "zone" or _besides_zone(place, level) != _besides_zone(current, level):
            return place
    return None


def _besides_zone(place: Mapping[str, str], level: Level) -> tuple[str | None, ...]:
    if level == "market":
        return (place["market"],)
    return (place["market"], place["primary"], place.get("aux"))
