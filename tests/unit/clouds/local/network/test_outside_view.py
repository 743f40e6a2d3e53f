"""Tests how a machine's network, as its host sees it, is compared with what the permission calls for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from provisioner.base.models import Destination, Environment
from provisioner.clouds.local.network import outside_view
from provisioner.clouds.local.network.egress import Counts
from provisioner.clouds.local.network.outside_view import View, compare
from provisioner.clouds.local.vm import qemu
from provisioner.clouds.local.vm.qemu import link_sockets
from tests.unit.fakes.qmp import serving
from tests.unit.fakes.world import environment

MANAGEMENT = """virtio-net-pci.0: index=0,type=nic,model=virtio-net-pci,macaddr=52:54:00:00:00:01
 \\ management: index=0,type=tap,fd=5
"""
LINK = """virtio-net-pci.1: index=0,type=nic,model=virtio-net-pci,macaddr=52:54:00:00:00:02
 \\ link: index=0,type=dgram,udp=../.link/primary.sock:../.link/aux.sock
"""
INTERNET = """virtio-net-pci.1: index=0,type=nic,model=virtio-net-pci,macaddr=52:54:00:00:00:03
 \\ internet: index=0,type=stream,unix
"""
HUB = """hub 0
 \\ link: virtio-net-pci.1: index=0,type=nic,model=virtio-net-pci,macaddr=52:54:00:00:00:02
 \\ hub-link1: link1: index=0,type=dgram,udp=../.link/primary.db.sock:../.link/db.sock
 \\ hub-link0: link0: index=0,type=dgram,udp=../.link/primary.aux.sock:../.link/aux.sock
 \\ hub-link2: link2: index=0,type=dgram,udp=../.link/primary.web.sock:../.link/web.sock
"""
CAPTURED = """filters:
  - capture-link: type=filter-dump,file=run/link.pcap,maxlen=2048,position=tail,status=on,netdev=link,queue=all
"""
PROXY = ("python", "-m", "provisioner.clouds.local.network.egress_proxy", "--fd", "5")
ALLOWED = (Destination(cidr="203.0.113.7/32", port=443),)

OFFLINE = environment()
PAIR = environment(roles=("primary", "aux"))
FOUR = environment(roles=("primary", "aux", "db", "web"))
ONLINE = environment(full_internet=True)
ALLOWING = environment(allowed_destinations=ALLOWED)


def view(link: bool = False, internet_fd: int | None = None, **changes: Any) -> View:
    """Returns the view of a machine with these cards, as it should be."""
    argv = qemu.network(link_sockets("primary", ("aux",)) if link else (), 0, internet_fd)
    cards = MANAGEMENT + (LINK if link else "") + (INTERNET if internet_fd else "")
    return replace(
        View(("qemu", "-m", "1024M", *argv, "-device", "virtio-blk-pci"), ("lo", "card"), cards, None, None), **changes
    )


def hub(**changes: Any) -> View:
    link = link_sockets("primary", ("aux", "db", "web"))
    arguments = ("qemu", *qemu.network(link, 0, None))
    return view(**{"arguments": arguments, "cards": HUB + MANAGEMENT, **changes})


def online(**changes: Any) -> View:
    seen: dict[str, Any] = {"proxy": (*PROXY, "--full-internet"), "counts": Counts(denied=4)}
    return view(internet_fd=9, **seen | changes)


def allowing(**changes: Any) -> View:
    seen: dict[str, Any] = {"proxy": (*PROXY, "--allow", "203.0.113.7/32:443"), "counts": Counts(onward=2)}
    return view(internet_fd=9, **seen | changes)


@pytest.mark.parametrize(
    ("seen", "record"),
    [
        (view(), OFFLINE),
        (view(link=True), PAIR),
        (view(link=True, cards=MANAGEMENT + LINK + CAPTURED), PAIR),
        (hub(), FOUR),
        (online(), ONLINE),
        (allowing(), ALLOWING),
    ],
    ids=["offline", "pair", "captured", "four", "online", "allowlist"],
)
def test_a_machine_as_it_should_be_has_no_differences(seen: View, record: Environment) -> None:
    assert compare(seen, record, "primary") == []


WRONG: dict[str, tuple[View, Environment, str]] = {
    "unrestricted": (
        view(arguments=("qemu", "-netdev", "user,id=management", *qemu.network((), 0, None)[2:])),
        OFFLINE, "arguments",
    ),
    "second-card": (
        view(arguments=("qemu", *qemu.network((), 0, None), "-netdev", "tap,id=x")), OFFLINE, "network arguments",
    ),
    "other-device": (
        view(arguments=("qemu", *qemu.network((), 0, None), "-device", "usb-net,netdev=x")), OFFLINE, "arguments",
    ),
    "plugged-later": (view(cards=MANAGEMENT + INTERNET), OFFLINE, "its cards lead to"),
    "no-link": (view(link=True), OFFLINE, "its cards lead to"),
    "qemus-own-stack": (view(cards=MANAGEMENT.replace("tap,fd=5", "user,net=10.0.2.0")), OFFLINE, "its cards lead"),
    "unknown-line": (view(cards=MANAGEMENT + "something else\n"), OFFLINE, "monitor says"),
    "other-filter": (view(cards=MANAGEMENT + CAPTURED.replace("dump", "mirror")), OFFLINE, "monitor says"),
    "other-file": (view(cards=MANAGEMENT + CAPTURED.replace("file=run/link.pcap", "file=/x")), OFFLINE, "monitor says"),
    "no-cards": (view(cards=""), OFFLINE, "its cards lead to []"),
    "hosts-network": (view(interfaces=()), OFFLINE, "not run in its own network namespace"),
    "second-interface": (view(interfaces=("lo", "card", "eth0")), OFFLINE, "not run in its own network namespace"),
    "proxy": (view(proxy=PROXY, counts=Counts()), OFFLINE, "has an egress proxy"),
    "no-proxy": (online(proxy=None), ONLINE, "does not run"),
    "no-counters": (online(counts=None), ONLINE, "does not run"),
    "nothing-denied": (online(counts=Counts()), ONLINE, "dropped none"),
    "too-open": (allowing(proxy=(*PROXY, "--full-internet")), ALLOWING, "another permission"),
    "longer-list": (
        allowing(proxy=(*PROXY, "--allow", "203.0.113.7/32:443", "--allow", "1.1.1.1/32:443")),
        ALLOWING, "another allowlist",
    ),
    "hub-of-one": (view(cards="hub 0\n" + MANAGEMENT), OFFLINE, "monitor says"),
    "second-hub": (hub(cards=HUB + "hub 1\n" + MANAGEMENT), FOUR, "monitor says"),
    "fourth-port": (
        hub(cards=HUB + " \\ hub-x: x: index=0,type=user,net=10.0.2.0\n" + MANAGEMENT), FOUR, "its cards lead to",
    ),
    "outside": (allowing(counts=Counts(onward=1, outside=1)), ALLOWING, "outside the allowlist"),
}  # fmt: skip


@pytest.mark.parametrize(("seen", "record", "expected"), WRONG.values(), ids=WRONG)
def test_each_difference_is_named(seen: View, record: Environment, expected: str) -> None:
    assert any(expected in difference for difference in compare(seen, record, "primary"))


def test_a_machine_that_cannot_be_seen_is_a_difference(tmp_path: Path) -> None:
    [difference] = outside_view.differences(tmp_path, OFFLINE, "primary")
    assert "primary machine: its network cannot be seen from outside: QEMU does not run" in difference


def test_the_monitor_is_reached_however_long_its_path_is(tmp_path: Path) -> None:
    directory = tmp_path / ("d" * 120)
    directory.mkdir()
    with serving(directory, {"query-status": "running"}), qemu.QMP(directory) as qmp:
        assert qmp.execute("query-status") == "running"
