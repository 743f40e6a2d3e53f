"""Tests isolation by real packets: offline, with full internet, and with an allowlist."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from provisioner.base.errors import IsolationError, MachineLostError
from provisioner.base.models import Destination, Environment, Role
from provisioner.clouds.local.network import outside_view
from provisioner.clouds.local.surface import DEVICES
from provisioner.clouds.local.vm import confinement, qemu
from provisioner.environment import lifecycle, snapshots
from provisioner.family.loader import load_family
from provisioner.isolation import questions
from provisioner.isolation.proof import prove_isolation
from provisioner.machines.connect import connect
from provisioner.recording.isolation import load
from provisioner.session import Session
from provisioner.store.snapshots import SnapshotStore
from tests.local import host_processes
from tests.local.conftest import FAMILIES, Lab, environment_of

pytestmark = pytest.mark.vm


@contextlib.contextmanager
def listening(address: str) -> Iterator[tuple[int, list[bytes]]]:
    """Runs a TCP service on the host; yields its port and the first bytes of each client."""
    visitors: list[bytes] = []
    with socket.create_server((address, 0)) as server:

        def serve() -> None:
            while True:
                try:
                    visitor, _ = server.accept()
                except OSError:
                    return
                with visitor, contextlib.suppress(ConnectionResetError):  # its machine may be torn down
                    visitor.settimeout(60)  # what it sends crosses an emulated machine that shares its CPU
                    visitor.sendall(b"welcome")
                    visitors.append(visitor.recv(16))

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1], visitors
        server.shutdown(socket.SHUT_RDWR)


def host_address() -> str:
    """Returns the host's own address on the outside network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("198.51.100.1", 9))
        address: str = probe.getsockname()[0]
        return address


@pytest.fixture
def session(open_session: Callable[[Mapping[str, str]], Session]) -> Session:
    return open_session({})


@pytest.fixture
def commands_umask() -> Iterator[None]:
    """Has this process write files as commands do."""
    before = os.umask(0o077)
    yield
    os.umask(before)


def probe_names(environment: Environment, machine: str, user: str) -> set[str]:
    return {probe.probe for probe in environment.probes if (probe.machine, probe.user) == (machine, user)}


@pytest.mark.parametrize(("machine", "user"), [("primary", "root"), ("primary", "agent"), ("aux", "root")])
def test_every_probe_of_an_offline_environment_ran_and_held(lab: Lab, machine: str, user: str) -> None:
    names = probe_names(lab.environment, machine, user)
    for probe in ("tcp 1.1.1.1:443", "udp 1.1.1.1:443", "dns udp 1.1.1.1", "dns tcp 1.1.1.1", "dns udp 10.0.2.3",
                   "dns udp 169.254.169.253", "resolve a public name", "ping 1.1.1.1", "ipv6", "s3 by name",
                   "metadata 169.254.169.254", "controller's loopback at 10.0.2.2",
                   "controller's loopback at 10.0.2.2 by udp"):  # fmt: skip
        assert (probe in names) == ((probe, user) != ("ping 1.1.1.1", "agent"))
    if user == "root":
        peer = lab.environment.endpoints["aux" if machine == "primary" else "primary"].private_address
        assert {f"tcp 1.1.1.1:443 through the card to {card}" for card in ("10.0.2.2", peer)} <= names
    assert all(probe.reached == probe.expected for probe in lab.environment.probes)


def test_a_forced_route_reaches_neither_host_nor_internet(lab: Lab) -> None:
    with listening("127.0.0.1") as (port, visitors):
        lab.text("ip route add default via 10.0.2.2 dev eth0")
        try:
            for target in ("10.0.2.2", host_address(), "127.0.0.1", "1.1.1.1"):
                for number in (port, 80):
                    reach = f"timeout 2 bash -c '</dev/tcp/{target}/{number}'"
                    assert lab.run(reach).exit_code != 0, f"{target}:{number} answers"
        finally:
            lab.text("ip route del default via 10.0.2.2 dev eth0")
        assert visitors == []


@pytest.mark.usefixtures("lab")
def test_no_card_of_the_host_leads_to_a_machine() -> None:
    assert confinement.CARD not in dict(socket.if_nameindex()).values()


@pytest.mark.parametrize("machine", ["primary", "aux"])
def test_no_network_stack_of_qemu_reads_what_a_machine_sends(lab: Lab, machine: Role) -> None:
    assert host_processes.backends(lab.session, lab.environment, machine) == {"tap", "dgram"}


def test_a_machine_whose_exec_server_lies_is_betrayed(lab: Lab) -> None:
    """Root in the aux VM puts a program in its place that answers whatever it is asked."""
    with contextlib.ExitStack() as logins:
        roles: tuple[Role, ...] = ("primary", "aux")
        connections = {role: logins.enter_context(connect(lab.session, lab.environment, role)) for role in roles}
        lab.lie(b'["", [["root", "x", "not reached", ""]]]', "aux")
        with pytest.raises(IsolationError, match="The aux machine"):
            prove_isolation(lab.session, lab.environment, connections)


@pytest.mark.usefixtures("commands_umask")
def test_full_internet_gets_out_and_does_not_reach_the_host(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "PROVISIONER_DATABASE", "SOME_TOKEN"):
        monkeypatch.setenv(name, "the-controllers-own-secret")
    with listening("127.0.0.1") as (loopback, first), listening("0.0.0.0") as (everywhere, second):
        with environment_of(session, "open_door", "online") as lab:
            host_processes.check(lab, "the-controllers-own-secret")
            assert host_processes.backends(session, lab.environment) == {"tap", "stream"}
            program = "import urllib.request as u; print(u.urlopen('http://deb.debian.org/', timeout=20).status)"
            fetch = f'python3 -c "{program}"'
            assert lab.text(fetch, user="agent") == "200"
            assert "Successfully" in lab.text("pip download -q --no-deps -d /tmp/six six && echo Successfully")
            for target in ("10.0.3.2", "10.0.2.2", host_address()):
                for port in (loopback, everywhere):
                    assert lab.run(f"timeout 3 bash -c '</dev/tcp/{target}/{port}'").exit_code != 0
            # Frames straight to the host's loopback, as only root in the machine can send them.
            lab.text("ip route add 127.66.0.0/16 via 10.0.3.2 dev eth1 onlink")
            lab.text("sysctl -qw net.ipv4.conf.all.route_localnet=1")
            away = "ip route del local 127.0.0.0/8 dev lo table local"
            lab.run(f"{away}; timeout 3 bash -c '</dev/tcp/127.66.0.1/{loopback}'")
        assert first == []
        assert second == []


def test_a_copy_reaches_its_allowlisted_destination_only(session: Session) -> None:
    address = host_address()
    with listening(address) as (open_port, visitors), listening(address) as (closed_port, none):
        allowed = Destination(cidr=f"{address}/32", port=open_port, host_names=("service.example",))
        with environment_of(session, "open_door", "offline", (allowed,)) as lab:
            refused = ((address, closed_port), ("1.1.1.1", open_port), ("10.0.3.2", open_port))
            _assert_reaches_only(lab, open_port, refused)
            assert b"hello\n" in visitors
            with copy_of(lab) as copy:
                proven = copy.environment.probes
                assert proven
                assert all(probe.reached == probe.expected for probe in proven)
                assert copy.environment.allowed_destinations == lab.environment.allowed_destinations
                before = visitors.count(b"hello\n")
                _assert_reaches_only(copy, open_port, refused)
                assert visitors.count(b"hello\n") > before
        assert none == []


def _assert_reaches_only(lab: Lab, open_port: int, refused: Iterable[tuple[str, int]]) -> None:
    talk = f"exec 3<>/dev/tcp/service.example/{open_port}; echo hello >&3; head -c7 <&3"
    assert lab.text(talk, user="agent") == "welcome"
    for target, port in refused:
        assert lab.run(f"timeout 3 bash -c '</dev/tcp/{target}/{port}'").exit_code != 0
    assert lab.run("timeout 5 getent hosts deb.debian.org").exit_code != 0


@contextlib.contextmanager
def copy_of(lab: Lab) -> Iterator[Lab]:
    """Freezes an environment, yields a copy of it, and removes both copy and snapshot."""
    store, name = SnapshotStore(lab.session.home), "reaches-out"
    if store.path(name).exists():  # a test before was killed
        store.remove(name)
    snapshots.freeze(lab.session, lab.environment, name)
    try:
        environment = snapshots.up(lab.session, name)
        try:
            assert {endpoint.origin for endpoint in environment.endpoints.values()} == {"snapshot"}
            with contextlib.ExitStack() as logins:
                yield Lab(lab.session, environment, logins)
        finally:
            lifecycle.destroy(lab.session, environment)
    finally:
        store.remove(name)


def test_the_proof_says_what_a_machine_meets_and_how_qemu_is_enclosed(session: Session) -> None:
    with environment_of(session, "open_door", "offline") as lab:
        seen = load(session.environments.logs(lab.environment.id)).surface["primary"]
        assert list(seen.differences()) == []
        assert seen.accelerator == lab.environment.versions["accelerator"]
        assert seen.qemu == lab.environment.versions["QEMU"]
        assert {device.partition(" ")[2] for device in seen.devices} == set(DEVICES.values())
        assert {"ipc", "mnt", "net", "pid", "uts"} <= set(seen.qemu_process.namespaces)
        assert (seen.qemu_process.no_new_privileges, seen.qemu_process.capabilities) == (True, "0" * 16)
        assert (seen.passt, seen.proxy_process) == ("", None)


def test_a_machine_whose_qemu_ends_is_lost_and_not_late(session: Session) -> None:
    with environment_of(session, "open_door", "offline") as lab:
        pid = qemu.live_pid(session.home.environments / lab.environment.id / "primary" / "run/qemu.pid")
        assert pid is not None
        command = ["sh", "-c", "echo begun; sleep 1000"]
        with connect(session, lab.environment, "primary") as connection, pytest.raises(MachineLostError):
            connection.run(command, timeout_seconds=120, on_stdout=lambda _: os.kill(pid, signal.SIGKILL))


def test_more_than_promised_tears_the_environment_down(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    # Judge an offline environment as if its permission forbade the allowlist, and look at it from outside likewise.
    address = host_address()
    before = session.environments.all()
    fixed, look = questions._fixed, outside_view.differences

    def forbidden(environment: Environment, peers: Iterable[str]) -> Iterator[questions.Probe]:
        return (replace(probe, expected=False) for probe in fixed(environment, peers))

    def without_allowlist(directory: Path, environment: Environment, *rest: Any) -> list[str]:
        return look(directory, environment.model_copy(update={"allowed_destinations": ()}), *rest)

    with listening(address) as (port, _):
        monkeypatch.setattr(questions, "_fixed", forbidden)
        monkeypatch.setattr(outside_view, "differences", without_allowlist)
        allowed = Destination(cidr=f"{address}/32", port=port)
        with pytest.raises(IsolationError, match="not isolated as promised") as raised:
            lifecycle.up(session, load_family(FAMILIES / "open_door"), "offline", (allowed,))
    details = raised.value.details or ""
    assert f"allowed {address}:{port}" in details
    assert "seen from outside: primary machine: QEMU runs with other network arguments" in details
    assert "seen from outside: primary machine: it has an egress proxy" in details
    assert session.environments.all() == before
