"""Shows that what a machine forwards comes through, as for a container behind the machine's own NAT."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pytest

from provisioner.base.models import Destination
from provisioner.session import Session
from tests import outside
from tests.local.conftest import Lab, environment_of

pytestmark = [pytest.mark.vm, pytest.mark.timeout(900)]

# What an engine does for a container on a bridge network.
NAMESPACE = """
set -e
ip netns add inner
ip link add outer type veth peer name eth0 netns inner
ip address add 172.30.0.1/24 dev outer
ip link set outer up
ip -netns inner address add 172.30.0.2/24 dev eth0
ip -netns inner link set eth0 up
ip -netns inner route add default via 172.30.0.1
sysctl -qw net.ipv4.ip_forward=1
iptables -t nat -A POSTROUTING -s 172.30.0.0/24 ! -o outer -j MASQUERADE
"""
TCP = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), 60) as link, link.makefile("rb") as answer:
    for size in sys.argv[3:]:
        link.sendall(size.encode() + b"\\n")
        print(len(answer.read(int(size))))
"""
UDP = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
    link.connect((sys.argv[1], int(sys.argv[2])))
    link.settimeout(20)
    for size in sys.argv[3:]:
        link.send(size.encode())
        print(len(link.recv(65535)))
"""
MEGABYTE = 1_000_000


@pytest.fixture
def session(open_session: Callable[[Mapping[str, str]], Session]) -> Session:
    return open_session({})


@pytest.fixture(params=["full", "allowlist"])
def forwarding(request: pytest.FixtureRequest, session: Session) -> Iterator[Lab]:
    """A machine with a namespace behind its NAT."""
    allowed = (Destination(cidr=f"{outside.THERE}/32", port=outside.PORT),) if request.param == "allowlist" else ()
    task = "offline" if allowed else "online"
    with outside.server_of_zeros(), environment_of(session, "open_door", task, allowed) as lab:
        lab.text(NAMESPACE)
        yield lab


def asked(lab: Lab, program: str, *sizes: int) -> list[int]:
    """What a program in the namespace gets of the server, for each size that it asks for."""
    words = " ".join(map(str, sizes))
    said = lab.text(f"ip netns exec inner python3 -c '{program}' {outside.THERE} {outside.PORT} {words}")
    return [int(line) for line in said.split()]


def test_a_download_through_the_machines_nat_is_whole(forwarding: Lab) -> None:
    sizes = [MEGABYTE, 4 * MEGABYTE, 1, MEGABYTE]
    assert asked(forwarding, TCP, *sizes) == sizes
    if forwarding.environment.full_internet:
        datagrams = [1, 1472, 9000]
        assert asked(forwarding, UDP, *datagrams) == datagrams
