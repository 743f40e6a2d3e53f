"""Carries frames between the machines, and between each machine and its passt, as network.py decides.

Every machine has one card (a QEMU stream socket) and one passt, which stands for everything outside the VPC: the
internet, the controller's connections to port 22, the metadata service and the resolver. Frames that are not allowed
are dropped. The first packet of a conversation decides; as on EC2, replies pass, and an allowed conversation continues
after its rule is removed.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any

from provisioner.clouds.local.network import egress
from tests.aws.ec2 import packets
from tests.aws.ec2.network import ICMP, TCP, UDP, Flow, Interface, Network, answers_dns, reachability
from tests.aws.ec2.packets import Packet

METADATA = IPv4Address("169.254.169.254")
LINK_LOCAL = IPv4Network("169.254.0.0/16")
# The address that passt forwards to the host's resolver (TEST-NET-2: never a real host).
RESOLVER = IPv4Address(egress.RESOLVER)
SSH_PORT = 22
DHCP_SERVER_PORT = 67
MAX_FLOWS = 1 << 16
MAX_QUEUED_BYTES = 8 << 20
ATTACH_SECONDS = 10
# While a file of this name is in the directory of a run, what leaves a VPC goes through a path for Ethernet's packets.
NARROW_PATH = "narrow-path"
# Ethernet's largest frame.
NARROW_BYTES = 14 + 1500
# passt gives up after ten seconds, and sends a SYN only once.
SYN_REPEATS = 8

_End = tuple[IPv4Address, int]
_FlowKey = tuple[int, IPv4Address, int, IPv4Address, int]


@dataclass
class Card:
    """Describes one machine's network card.

    Args:
        gateway: the router's address in the machine's subnet; to passt it is the host's loopback.
        redirects: an address and port of the cloud -> the port of the host's loopback that serves it.
        dns_queries: the machine's port -> the resolver's address to which it sent a query from that port.
        unanswered: the controller's ports with a connection that the machine has not answered yet.
    """

    instance_id: str
    vpc_id: str
    mac: bytes
    gateway: IPv4Address
    redirects: Mapping[_End, int]
    to_guest: asyncio.StreamWriter
    to_passt: asyncio.StreamWriter
    dns_queries: OrderedDict[int, IPv4Address] = field(default_factory=OrderedDict)
    unanswered: set[int] = field(default_factory=set)

    def served(self, port: int) -> _End | None:
        """Returns the cloud's address that a port of the host's loopback serves."""
        return next((end for end, redirected in self.redirects.items() if redirected == port), None)


class Fabric:
    """Carries all frames of the fixture, in a thread of its own.

    Args:
        controller: the source address of this host's connections, as the rules see it.
        directory: of the run.
        silent_when_off: whether a disabled metadata service does not answer at all.
    """

    def __init__(self, controller: IPv4Address, directory: Path, *, silent_when_off: bool) -> None:
        self._controller = controller
        self._directory = directory
        self._silent_when_off = silent_when_off
        self._network = Network()
        self._forbidden: tuple[IPv4Network, ...] = egress.NEVER
        self._cards: dict[str, Card] = {}
        self._flows: dict[str, OrderedDict[_FlowKey, None]] = {}
        self._tasks: dict[str, list[asyncio.Task[None]]] = {}
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="fabric", daemon=True).start()

    def update(self, network: Network) -> None:
        """Applies new rules from now on."""
        self._forbidden = (*egress.NEVER, *egress.host_networks(Path("/proc/net/fib_trie").read_text())[0])
        self._network = network

    def attach(
        self, interface: Interface, mac: str, qemu: socket.socket, passt: socket.socket, redirects: Mapping[_End, int]
    ) -> None:
        """Connects a machine's card and its passt. The fabric takes over both sockets."""

        async def join() -> None:
            guest_reader, guest_writer = await asyncio.open_connection(sock=qemu)
            passt_reader, passt_writer = await asyncio.open_connection(sock=passt)
            gateway = interface.subnet.network.network_address + 1
            hardware = bytes.fromhex(mac.replace(":", ""))
            card = Card(
                interface.instance_id, interface.vpc.id, hardware, gateway, redirects, guest_writer, passt_writer
            )
            self._cards[interface.instance_id] = card
            self._tasks[interface.instance_id] = [
                asyncio.create_task(_frames(guest_reader, lambda frame: self._from_guest(card, frame), passt_writer)),
                asyncio.create_task(_frames(passt_reader, lambda frame: self._from_passt(card, frame), guest_writer)),
            ]

        self._run(join())

    def detach(self, instance_id: str) -> None:
        """Disconnects a machine, which ends its passt."""

        async def part() -> None:
            card = self._cards.pop(instance_id, None)
            tasks = self._tasks.pop(instance_id, [])
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if card:
                card.to_guest.transport.abort()
                card.to_passt.transport.abort()

        self._run(part())

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(ATTACH_SECONDS)

    def _from_guest(self, card: Card, frame: bytes) -> None:
        interface = self._network.interfaces.get(card.instance_id)
        if interface is None:
            return
        if answer := packets.arp_answer(frame, interface.address):
            _send(card.to_guest, answer)
            return
        packet = packets.read(frame)
        # A VPC's DHCP is answered whatever rules and routes say. passt plays it.
        if packet is not None and packet.protocol == UDP and packet.destination_port == DHCP_SERVER_PORT:
            _send(card.to_passt, frame)
            return
        # As EC2's source check does, drop packets with another source address.
        if packet is not None and packet.source == interface.address:
            self._forward(card, interface, frame, packet)

    def _forward(self, card: Card, interface: Interface, frame: bytes, packet: Packet) -> None:
        to = packet.destination
        if packet.protocol == UDP and packet.destination_port == 53 and answers_dns(interface, to):
            _remember(card.dns_queries, packet.source_port, to)
            _send(card.to_passt, packets.redirected(frame, destination=(RESOLVER, 53)))
        elif to in LINK_LOCAL:
            if to == METADATA and (interface.metadata or not self._silent_when_off):
                self._to_service(card, frame, packet)
        elif to == card.gateway:
            self._to_controller(card, frame, packet)
        elif neighbour := self._network.at(card.vpc_id, to):
            other = self._cards.get(neighbour.instance_id)
            if other and self._passes(card.vpc_id, packet):
                _send(other.to_guest, packets.addressed(frame, other.mac))
        elif not any(to in network for network in interface.vpc.networks) and self._passes(card.vpc_id, packet):
            self._to_internet(card, frame, packet)

    def _is_lost(self, frame: bytes) -> bool:
        """Returns whether a frame is too large for its path. No ICMP says so: no rule of ours lets any in."""
        return len(frame) > NARROW_BYTES and (self._directory / NARROW_PATH).exists()

    def _to_controller(self, card: Card, frame: bytes, packet: Packet) -> None:
        if self._known(card.vpc_id, packet) and not self._is_lost(frame):  # a reply
            card.unanswered.discard(packet.destination_port)
            _send(card.to_passt, frame)
            # Debian 12's passt sends this only after the client has sent data; in SSH the server sends first.
            if answer := packets.handshake_answer(frame):
                _send(card.to_guest, answer)

    def _to_internet(self, card: Card, frame: bytes, packet: Packet) -> None:
        if (packet.destination, packet.destination_port) in card.redirects:
            self._to_service(card, frame, packet)
        elif not any(packet.destination in network for network in self._forbidden) and not self._is_lost(frame):
            _send(card.to_passt, frame)

    def _to_service(self, card: Card, frame: bytes, packet: Packet) -> None:
        port = card.redirects.get((packet.destination, packet.destination_port))
        if port and packet.protocol == TCP:
            _send(card.to_passt, packets.redirected(frame, destination=(card.gateway, port)))

    def _from_passt(self, card: Card, frame: bytes) -> None:
        packet = packets.read(frame)
        interface = self._network.interfaces.get(card.instance_id)
        if packet is None or interface is None:
            return
        if packet.protocol == UDP and packet.source_port == DHCP_SERVER_PORT:
            answer = packets.with_name_server(frame, interface.vpc.networks[0].network_address + 2)
            _send(card.to_guest, packets.addressed(answer, card.mac))
            return
        if packet.destination != interface.address:
            return
        if packet.source == RESOLVER and packet.protocol == UDP:
            if resolver := card.dns_queries.get(packet.destination_port):
                answer = packets.redirected(frame, source=(resolver, 53))
                _send(card.to_guest, packets.addressed(answer, card.mac))
            return
        if packet.source == card.gateway:
            self._from_gateway(card, frame, packet)
        elif self._known(card.vpc_id, packet):
            _send(card.to_guest, packets.addressed(frame, card.mac))

    def _from_gateway(self, card: Card, frame: bytes, packet: Packet) -> None:
        if packet.protocol != TCP:
            return
        if (end := card.served(packet.source_port)) and not packet.opens:
            frame = packets.redirected(frame, source=end)
        elif not self._from_controller(card, packet):
            return
        elif packet.opens:
            card.unanswered.add(packet.source_port)
            self._repeat(card, packet.source_port, packets.addressed(frame, card.mac), SYN_REPEATS)
        _send(card.to_guest, packets.addressed(frame, card.mac))

    def _repeat(self, card: Card, port: int, frame: bytes, times: int) -> None:
        """Repeats the first packet of a connection every second until the machine answers."""
        if not times or card.instance_id not in self._cards:
            card.unanswered.discard(port)
        elif port in card.unanswered:
            if times < SYN_REPEATS:
                _send(card.to_guest, frame)
            self._loop.call_later(1, self._repeat, card, port, frame, times - 1)

    def _from_controller(self, card: Card, packet: Packet) -> bool:
        if not packet.opens:
            return self._known(card.vpc_id, packet)
        if packet.destination_port != SSH_PORT:
            return False
        flow = Flow(card.vpc_id, TCP, self._controller, packet.source_port, packet.destination, packet.destination_port)
        return self._opened(packet, flow)

    def _passes(self, vpc_id: str, packet: Packet) -> bool:
        """Returns whether an instance's packet belongs to a known conversation, or may open one."""
        if self._known(vpc_id, packet) and not (packet.protocol == TCP and packet.opens):
            return True
        end = (packet.source, packet.source_port, packet.destination, packet.destination_port)
        return packet.opens and self._opened(packet, Flow(vpc_id, packet.protocol, *end))

    def _opened(self, packet: Packet, flow: Flow) -> bool:
        if not reachability(self._network, flow).open:
            return False
        flows = self._flows.setdefault(flow.vpc_id, OrderedDict())
        for key in (_key(packet), _reverse(packet)):
            _remember(flows, key, None)
        return True

    def _known(self, vpc_id: str, packet: Packet) -> bool:
        return _key(packet) in self._flows.get(vpc_id, ())


def _key(packet: Packet) -> _FlowKey:
    return (packet.protocol, packet.source, packet.source_port, packet.destination, packet.destination_port)


def _reverse(packet: Packet) -> _FlowKey:
    if packet.protocol == ICMP:  # a reply has the same id and type 0
        return (ICMP, packet.destination, packet.source_port, packet.source, 0)
    return (packet.protocol, packet.destination, packet.destination_port, packet.source, packet.source_port)


def _remember(entries: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    entries[key] = value
    entries.move_to_end(key)
    if len(entries) > MAX_FLOWS:
        entries.popitem(last=False)


async def _frames(
    reader: asyncio.StreamReader, take: Callable[[bytes], None], usual_sink: asyncio.StreamWriter
) -> None:
    """Takes frames, each after its length in 4 bytes, and reads no faster than the usual sink does."""
    try:
        while True:
            length = int.from_bytes(await reader.readexactly(4), "big")
            take(await reader.readexactly(length))
            await usual_sink.drain()
    except (asyncio.IncompleteReadError, OSError):
        return  # QEMU or passt has ended


def _send(sink: asyncio.StreamWriter, frame: bytes) -> None:
    """Queues a frame. A receiver that does not read loses frames, as on any wire."""
    if sink.transport.get_write_buffer_size() < MAX_QUEUED_BYTES and not sink.is_closing():
        sink.write(len(frame).to_bytes(4, "big") + frame)
