"""Carries a machine's UDP datagrams and pings: one connected socket for each flow. Standard library only.

A connected socket has a port that the kernel chose from the ephemeral range, never one that the machine chose, and
takes nothing but its peer's answers. So the host's ports and its programs' datagrams stay the host's. The number of
flows is bounded: a new one ends the one that has been silent longest. So is the rate of new ones: the host's firewall
remembers each for a while after its end.
"""

from __future__ import annotations

import asyncio
import socket
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from provisioner.clouds.local.network import datagrams
from provisioner.clouds.local.network.datagrams import ICMP, Flow
from provisioner.clouds.local.network.egress_rules import RESOLVER
from provisioner.clouds.local.network.resolvers import Resolvers

# A hundred machines leave the host some of its 28,232 ephemeral ports (ip(7), ip_local_port_range).
MAX_FLOWS = 256
# Linux remembers a UDP flow or a ping for 30 seconds after its last datagram (nf_conntrack_udp_timeout), and one whose
# peer goes on answering for 120. It has room for 262,144 unless memory is short (nf_conntrack_max). A machine that
# opens all that it may takes 2000 of them, or 6500 with such a peer. An honest one that looks up each name anew, as a
# crawler does, begins some tens per second.
NEW_FLOWS_PER_SECOND = 50
NEW_FLOWS_AT_ONCE = 500
# RFC 4787, REQ-5: a mapping must not expire in less than two minutes.
IDLE_SECONDS = 120.0
EXPIRY_SECONDS = 5.0
MAX_DATAGRAM_BYTES = 1 << 16
# Other flows and TCP have their turn after so many answers.
ANSWERS_AT_ONCE = 32
DNS_PORT = 53
_RESOLVER = socket.inet_aton(RESOLVER)
# linux/in.h. Larger datagrams leave in fragments: the machine would never learn of a smaller path MTU.
_IP_MTU_DISCOVER, _IP_PMTUDISC_DONT = 10, 0


@dataclass
class _Open:
    """An open flow."""

    connected: socket.socket
    peer: object  # as recvfrom names it
    mac: bytes
    used: float


class DatagramFlows:
    """Sends what a machine's frames carry, and returns the answers as frames.

    Args:
        answer: takes each frame for the machine.
        resolvers: the servers that answer DNS.
    """

    def __init__(self, answer: Callable[[bytes], None], resolvers: Resolvers) -> None:
        self._answer = answer
        self._resolvers = resolvers
        self._loop = asyncio.get_running_loop()
        self._flows: OrderedDict[Flow, _Open] = OrderedDict()  # the one that was silent longest comes first
        self._tokens = float(NEW_FLOWS_AT_ONCE)
        self._refilled_at = self._loop.time()
        self._identification = 0

    def forward(self, frame: bytes) -> None:
        """Sends a frame's datagram on. Like any network, drops what it cannot send."""
        datagram = datagrams.parse(frame)
        if datagram is None:
            return
        flow = self._flows.get(datagram.flow)
        try:
            if flow is None:
                if not self._takes_token():
                    return
                flow = self._open(datagram.flow, datagram.mac)
            flow.used = self._loop.time()
            self._flows.move_to_end(datagram.flow)
            flow.connected.send(datagram.payload)
        except OSError:  # unreachable, refused before, full, or no permission for pings
            return

    def _takes_token(self) -> bool:
        """Returns whether a new flow may begin now, by a token bucket; if so, takes a token."""
        at = self._loop.time()
        refilled = self._tokens + (at - self._refilled_at) * NEW_FLOWS_PER_SECOND
        self._tokens, self._refilled_at = min(refilled, NEW_FLOWS_AT_ONCE), at
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def _open(self, flow: Flow, mac: bytes) -> _Open:
        """Connects a socket to the flow's peer.

        Raises:
            OSError: the peer cannot be reached.
        """
        if len(self._flows) >= MAX_FLOWS:
            self._close(next(iter(self._flows)))
        address, port = self._destination(flow)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        protocol = socket.IPPROTO_ICMP if flow.protocol == ICMP else socket.IPPROTO_UDP
        connected = socket.socket(family, socket.SOCK_DGRAM, protocol)
        try:
            connected.setblocking(False)
            if family == socket.AF_INET:
                connected.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _IP_PMTUDISC_DONT)
            connected.connect((address, port))
            peer = (address, 0) if flow.protocol == ICMP else connected.getpeername()
        except OSError:
            connected.close()
            raise
        self._flows[flow] = _Open(connected, peer, mac, self._loop.time())
        self._loop.add_reader(connected, self._receive, flow)
        return self._flows[flow]

    def _destination(self, flow: Flow) -> tuple[str, int]:
        if flow.peer != _RESOLVER:
            return socket.inet_ntoa(flow.peer), flow.peer_port
        if flow.peer_port != DNS_PORT:
            raise ConnectionRefusedError("the resolver answers DNS only")
        return self._resolvers.choose(self._loop.time()), DNS_PORT

    def _receive(self, flow: Flow) -> None:
        opened = self._flows[flow]
        for _ in range(ANSWERS_AT_ONCE):
            try:
                # A datagram from elsewhere may arrive in the instant in which the socket has a port and no peer yet.
                payload, source = opened.connected.recvfrom(MAX_DATAGRAM_BYTES)
                if source != opened.peer:
                    continue
            except OSError:  # nothing more, or the peer refused what was sent
                return
            if flow.peer == _RESOLVER:
                self._resolvers.answered()
            self._identification += 1
            for frame in datagrams.frames(flow, opened.mac, payload, self._identification):
                self._answer(frame)

    def _close(self, flow: Flow) -> None:
        connected = self._flows.pop(flow).connected
        self._loop.remove_reader(connected)
        connected.close()

    async def expire(self) -> None:
        """Ends flows in which the machine has sent nothing for long; all of them when it is cancelled."""
        try:
            while True:
                await asyncio.sleep(EXPIRY_SECONDS)
                oldest = self._loop.time() - IDLE_SECONDS
                for flow in [flow for flow, opened in self._flows.items() if opened.used < oldest]:
                    self._close(flow)
        finally:
            for flow in list(self._flows):
                self._close(flow)
