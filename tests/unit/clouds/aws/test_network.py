"""The numbers of an ACL's rules stay when controllers come and go; each allowlist has a subnet of its own."""

from __future__ import annotations

import pytest

from provisioner.base.errors import InfrastructureError
from provisioner.clouds.aws.network import allowlist_subnet, numbered, zone_parts

FIRST, SECOND, THIRD = "192.0.2.1/32", "198.51.100.1/32", "203.0.113.1/32"


def test_a_controller_keeps_its_number_and_a_new_one_gets_the_first_that_is_free() -> None:
    known = numbered({SECOND, FIRST}, {})
    assert known == {FIRST: 100, SECOND: 101}
    assert numbered({FIRST, SECOND, THIRD}, known) == {**known, THIRD: 102}
    assert numbered({SECOND, THIRD}, known) == {SECOND: 101, THIRD: 100}


def test_an_allowlists_subnet_is_free_and_in_the_block() -> None:
    first = allowlist_subnet("one", ())
    second = allowlist_subnet("one", (first,))
    assert first != second
    assert first.startswith("10.215.")
    assert int(first.split(".")[2]) >= 128
    taken = tuple(f"10.215.{third}.{fourth}/28" for third in range(128, 256) for fourth in range(0, 256, 16))
    with pytest.raises(InfrastructureError, match="no room"):
        allowlist_subnet("one", taken)


@pytest.mark.parametrize(
    ("zones", "known", "parts"),
    [
        ("acb", {}, {"a": 0, "b": 1, "c": 2}),
        ("abcd", {"b": 0, "c": 1}, {"b": 0, "c": 1, "a": 2, "d": 3}),
        ("abc", {"a": 0, "c": 2}, {"a": 0, "c": 2, "b": 1}),  # b's is not shown yet
        ("ab", {"a": 0, "b": 1, "z": 2}, {"a": 0, "b": 1, "z": 2}),  # z does not say that it is available
        ("abcdefgh", {"i": 0}, {"i": 0} | {zone: part for part, zone in enumerate("abcdefg", 1)}),
    ],
)
def test_a_zone_keeps_its_part_and_new_ones_get_the_free_ones(
    zones: str, known: dict[str, int], parts: dict[str, int]
) -> None:
    assert zone_parts(zones, known) == parts
