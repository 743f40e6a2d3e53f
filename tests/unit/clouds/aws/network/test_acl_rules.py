"""The numbers of an ACL's rules stay when controllers come and go."""

from __future__ import annotations

from provisioner.clouds.aws.network.acl_rules import numbered

FIRST, SECOND, THIRD = "192.0.2.1/32", "198.51.100.1/32", "203.0.113.1/32"


def test_the_first_controllers_are_numbered_in_order() -> None:
    assert numbered({SECOND, FIRST}, {}) == {FIRST: 100, SECOND: 101}


def test_another_controller_changes_no_number() -> None:
    known = numbered({SECOND, THIRD}, {})
    assert numbered({FIRST, SECOND, THIRD}, known) == {**known, FIRST: 102}


def test_a_number_that_became_free_is_given_again() -> None:
    known = numbered({FIRST, SECOND}, {})
    assert numbered({SECOND, THIRD}, known) == {SECOND: 101, THIRD: 100}
