"""What the host answers a machine on its port, and what a hostile one can make it do."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from provisioner.clouds.local.vm import credential_port
from provisioner.clouds.local.vm.credential_port import CredentialPort, TooLongError, message
from tests.unit.fakes.port import connected


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A machine's directory with credentials."""
    (tmp_path / "credentials").mkdir()
    (tmp_path / "credentials" / "host_key").write_bytes(b"line 1\nend 0\n")
    (tmp_path / "credentials" / "hostname").write_text("primary")
    return tmp_path


def records(body: bytes) -> dict[str, bytes]:
    """Reads a message's records as credentials.pl does."""
    values = {}
    while body != b"end 0\n":
        head, _, body = body.partition(b"\n")
        name, _, length = head.partition(b" ")
        values[name.decode()], body = body[: int(length)], body[int(length) :]
    return values


def test_every_record_comes_with_its_length() -> None:
    kind, _, rest = message({"b": b"end 0\n", "a": b"", "c": bytes(range(256))}).partition(b" ")
    length, _, body = rest.partition(b"\n")
    assert kind == b"credentials"
    assert int(length) == len(body)
    assert records(body) == {"a": b"", "b": b"end 0\n", "c": bytes(range(256))}


def test_credentials_that_the_machine_would_refuse_are_not_sent() -> None:
    with pytest.raises(TooLongError):
        message({"hosts": b"x" * credential_port.MAXIMUM_BYTES})


def test_a_machine_gets_its_credentials_and_a_new_seed_each_time(machine: Path) -> None:
    with connected(machine) as (port, theirs):
        seeds = set()
        for _ in range(2):
            theirs.sendall(b"?")
            port.serve()
            values = records(theirs.recv(65536).partition(b"\n")[2])
            seeds.add(values.pop("seed"))
            assert values == {"host_key": b"line 1\nend 0\n", "hostname": b"primary"}
        assert {len(seed) for seed in seeds} == {credential_port.SEED_BYTES}
        assert len(seeds) == 2


def test_a_machine_that_asks_for_the_time_gets_it_in_nanoseconds(machine: Path) -> None:
    with connected(machine) as (port, theirs):
        theirs.sendall(b"t")
        before = time.time_ns()
        port.serve()
        head, _, said = theirs.recv(100).partition(b"\n")
        assert head == b"time 19"
        assert before <= int(said) <= time.time_ns()


def test_a_machine_is_told_the_time_as_soon_as_it_asks(machine: Path) -> None:
    credentials, withheld = machine / "credentials", machine / "withheld"
    with connected(machine) as (port, theirs):
        credentials.rename(withheld)
        theirs.sendall(b"?" * 1000)
        port.serve()
        withheld.rename(credentials)
        theirs.sendall(b"t")
        port.serve()
        assert theirs.recv(100).startswith(b"time 19\n")


def test_what_a_machine_has_taken_is_noted(machine: Path) -> None:
    with connected(machine) as (port, theirs):
        port.serve()
        assert not (machine / credential_port.TAKEN).exists()
        theirs.sendall(b".")
        port.serve()
        assert (machine / credential_port.TAKEN).exists()


def test_a_port_that_is_not_there_is_looked_for_again(tmp_path: Path) -> None:
    port = CredentialPort(tmp_path)
    assert not port.connect()
    port.serve()
    with connected(tmp_path) as (_, _theirs):
        assert port.connect()
    port.serve()
    port.serve()
    assert not port.connect()
    assert port.waits_for() == ([], [])
