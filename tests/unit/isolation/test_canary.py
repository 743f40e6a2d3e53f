"""Tests which visitors the canary takes for machines."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from provisioner.base.models import Role
from provisioner.isolation import canary
from provisioner.isolation.canary import Canary
from tests.waiting import BOUND_SECONDS, until

WORDS: dict[Role, str] = {"primary": "0123456789abcdef" * 2, "aux": "fedcba9876543210" * 2}


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[Canary]:
    monkeypatch.setattr(canary, "VISIT_SECONDS", BOUND_SECONDS)
    with Canary(WORDS) as listener:
        yield listener


def seen(listener: Canary, count: int) -> list[Role]:
    until(lambda: len(listener.visitors()) >= count)
    return listener.visitors()


def test_a_word_names_its_machine(listening: Canary) -> None:
    with socket.create_connection(("127.0.0.1", listening.ports.tcp)) as visitor:
        visitor.sendall(WORDS["aux"][:10].encode())
        until(lambda: any(heard for _, heard in list(listening._visits.values())))
        assert listening.visitors() == []
        visitor.sendall(WORDS["aux"][10:].encode())
        assert seen(listening, 1) == ["aux"]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.sendto(WORDS["primary"].encode(), ("127.0.0.1", listening.ports.udp))
        assert seen(listening, 2) == ["aux", "primary"]


def test_a_silent_visitor_is_dismissed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canary, "VISIT_SECONDS", 0.05)
    with Canary(WORDS) as listener, socket.create_connection(("127.0.0.1", listener.ports.tcp)) as visitor:
        visitor.settimeout(BOUND_SECONDS)
        assert visitor.recv(1) == b""


def test_it_ends_at_once_and_frees_its_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canary, "VISIT_SECONDS", 10 * BOUND_SECONDS)  # which pytest does not wait for
    with Canary(WORDS) as listener:
        visitor = socket.create_connection(("127.0.0.1", listener.ports.tcp))
    visitor.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", listener.ports.tcp))


@pytest.mark.parametrize("kind", ["tcp", "udp"])
def test_a_word_that_arrives_in_the_last_moment_counts(kind: str) -> None:
    for _ in range(50):
        with Canary(WORDS) as listener:
            if kind == "udp":
                with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
                    sender.sendto(WORDS["aux"].encode(), ("127.0.0.1", listener.ports.udp))
            else:
                with socket.create_connection(("127.0.0.1", listener.ports.tcp)) as visitor:
                    visitor.sendall(WORDS["aux"].encode())
        assert listener.visitors() == ["aux"]
