from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from provisioner.base.errors import UsageError
from provisioner.base.models import Destination
from provisioner.environment.allowlist import AllowedDestination, parse_destination, resolve


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10.1.2.3:8080", AllowedDestination("10.1.2.3/32", 8080, is_name=False)),
        ("10.0.0.0/8:443", AllowedDestination("10.0.0.0/8", 443, is_name=False)),
        ("API.example-1.com:65535", AllowedDestination("api.example-1.com", 65535, is_name=True)),
        ("proxy:1", AllowedDestination("proxy", 1, is_name=True)),
        ("1password.com:443", AllowedDestination("1password.com", 443, is_name=True)),
    ],
)
def test_a_destination_is_parsed(text: str, expected: AllowedDestination) -> None:
    assert parse_destination(text) == expected


@pytest.mark.parametrize("host", ["-a.com", "a-.com", "a..com", "a_b.com", "a.123", "a" * 64, ".".join(["a" * 50] * 6)])
def test_a_name_outside_rfc_1123_is_refused(host: str) -> None:
    with pytest.raises(UsageError, match="is neither a host name nor an IPv4 network"):
        parse_destination(f"{host}:80")


def answer(names: dict[str, list[str]]) -> Callable[..., list[tuple[object, ...]]]:
    """Returns a resolver that knows only these names, so that the tests need no network."""

    def getaddrinfo(host: str, port: int, *_: object) -> list[tuple[object, ...]]:
        if host not in names:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in names[host]]

    return getaddrinfo


def test_names_become_addresses_and_are_combined(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"a.example": ["192.0.2.2", "192.0.2.1"], "b.example": ["192.0.2.1"]}
    monkeypatch.setattr(socket, "getaddrinfo", answer(names))
    texts = ["a.example:443", "b.example:443", "b.example:80", "10.0.0.0/8:22", "192.0.2.2:443", "a.example:443"]
    assert resolve(parse_destination(text) for text in texts) == (
        Destination(cidr="192.0.2.1/32", port=443, host_names=("a.example", "b.example")),
        Destination(cidr="192.0.2.2/32", port=443, host_names=("a.example",)),
        Destination(cidr="192.0.2.1/32", port=80, host_names=("b.example",)),
        Destination(cidr="10.0.0.0/8", port=22),
    )


def test_an_unknown_name_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", answer({}))
    with pytest.raises(UsageError, match=r"none\.example:443 has no IPv4 address: Name or service not known"):
        resolve([parse_destination("none.example:443")])


@pytest.mark.parametrize("address", ["127.0.0.1", "169.254.169.254", "0.0.0.0"])
def test_a_name_of_a_forbidden_address_is_refused(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", answer({"trap.example": ["192.0.2.1", address]}))
    with pytest.raises(UsageError, match=r"trap\.example:80, at .* reaches .* which cannot be allowed"):
        resolve([parse_destination("trap.example:80")])


def test_localhost_is_refused_by_the_real_resolver() -> None:
    with pytest.raises(UsageError, match=r"reaches 127\.0\.0\.0/8"):
        resolve([parse_destination("localhost:80")])
