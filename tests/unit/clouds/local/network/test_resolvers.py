"""Which of the host's name servers a machine's questions go to."""

from __future__ import annotations

import pytest

from provisioner.clouds.local.network.resolvers import Resolvers, parse_resolv_conf


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ("# comment\nnameserver 192.0.2.1\nsearch x\nnameserver 2001:db8::1 \n", ("192.0.2.1", "2001:db8::1")),
        ("", ("127.0.0.1",)),
        ("nameserver\nnameserver nonsense\n", ("127.0.0.1",)),
        ("".join(f"nameserver 192.0.2.{number}\n" for number in range(5)), ("192.0.2.0", "192.0.2.1", "192.0.2.2")),
    ],
    ids=["two", "none", "broken", "many"],
)
def test_resolv_conf_is_read_as_glibc_reads_it(text: str, addresses: tuple[str, ...]) -> None:
    assert parse_resolv_conf(text) == addresses


def test_the_next_resolver_is_asked_after_a_silent_one() -> None:
    resolvers = Resolvers()
    resolvers.replace(["first", "second"])
    assert [resolvers.choose(at) for at in (0, 1, 3.9, 5, 6, 9.5)] == [*["first"] * 3, *["second"] * 2, "first"]


def test_a_resolver_that_answers_is_kept() -> None:
    resolvers = Resolvers()
    resolvers.replace(["first", "second"])
    for at in range(0, 100, 3):
        assert resolvers.choose(at) == "first"
        resolvers.answered()


def test_new_resolvers_are_asked_from_the_first_on() -> None:
    resolvers = Resolvers()
    resolvers.replace(["first", "second"])
    resolvers.choose(0)
    resolvers.replace(["first", "second"])
    assert resolvers.choose(9) == "second"
    resolvers.replace(["third"])
    assert resolvers.choose(10) == "third"
