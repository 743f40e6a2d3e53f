"""Where to create an environment, and where to go on when EC2 lacks the capacity. Pure.

A place is a zone, an instance type per role, and a market (spot or on-demand). They are tried zone by zone, then type
by type, then on demand; the region is the operator's business (--region, more than once).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal

from provisioner.models import MachineSize

Level = Literal["zone", "type", "market"]

# Error code -> (what has to change, why). EC2 API reference, "Error codes".
SHORTAGES: dict[str, tuple[Level, str]] = {
    "InsufficientInstanceCapacity": ("zone", "EC2 has no capacity for {types} in {zone}"),
    "UnfulfillableCapacity": ("zone", "EC2 has no capacity for {types} in {zone}"),
    "InsufficientHostCapacity": ("zone", "EC2 has no capacity for {types} in {zone}"),
    "Unsupported": ("zone", "{zone} does not offer {types}"),
    "VcpuLimitExceeded": ("type", "the account's vCPU quota is too small for {types}"),
    "InstanceLimitExceeded": ("type", "the account's quota is too small for {types}"),
    "MaxSpotInstanceCountExceeded": ("market", "the account's quota of spot instances is used up"),
    "SpotMaxPriceTooLow": ("market", "the spot price is above the on-demand price"),
}


# The provider repeats a request that it got no answer to; what these codes are for was then made by the first one.
REPETITIONS = (
    "InvalidPermission.Duplicate", "InvalidGroup.Duplicate", "InvalidKeyPair.Duplicate", "RouteAlreadyExists",
    "Resource.AlreadyAssociated", "ConflictException",
)  # fmt: skip


def is_repetition(said: str) -> bool:
    """Whether a failure says that something is there already, which only a lost answer explains."""
    return any(re.search(rf"\b{re.escape(code)}\b", said) for code in REPETITIONS)


def places(sizes: Mapping[str, MachineSize], zones: Sequence[str], *, spot: bool) -> list[dict[str, str]]:
    """All places for an environment, the best first.

    Args:
        sizes: the machines by role, each with its types.
        zones: availability zones that have a subnet, the best first.
        spot: whether spot comes before on-demand.
    """
    found = []
    for market in ("spot", "on-demand") if spot else ("on-demand",):
        for rank in range(max(len(size.types) for size in sizes.values())):
            types = {role: size.types[min(rank, len(size.types) - 1)] for role, size in sizes.items()}
            found += [{"market": market, **types, "zone": zone} for zone in zones]
    return found


def shortage(said: str) -> tuple[Level, str] | None:
    """What a failure says of capacity or quota: what has to change, and why; None: it says nothing of them."""
    for code, found in SHORTAGES.items():
        # As a whole word: UnsupportedOperation is another error.
        if re.search(rf"\b{code}\b", said):
            return found
    return None


def next_place(all_places: Sequence[dict[str, str]], current: Mapping[str, str], level: Level) -> dict[str, str] | None:
    """The first place after the current one that differs in what has to change; None: there is none."""
    at = next((index for index, one in enumerate(all_places) if one.items() <= current.items()), len(all_places))
    for one in all_places[at + 1 :]:
        if level == "zone" or _beside(one, level) != _beside(current, level):
            return one
    return None


def _beside(place: Mapping[str, str], level: Level) -> tuple[str | None, ...]:
    if level == "market":
        return (place["market"],)
    return (place["market"], place["primary"], place.get("aux"))
