"""The egress proxy with the real passt. The test plays the machine: it sends Ethernet frames into the socket pair."""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from provisioner.clouds.local.network import egress
from provisioner.clouds.local.network.egress import Counts, read
from tests.unit.clouds.local.network import frame_maker
from tests.waiting import BOUND_SECONDS, until

SILENCE_SECONDS = 0.5

# Joins a process's network namespace, through the user namespace that owns it (passt itself sits in a deeper one),
# connects as passt does, sends 5 MB, ends its direction and counts what comes back.
SEND_FROM_INSIDE = """
import ctypes, fcntl, os, socket, struct, sys
NS_GET_USERNS = 0xB701
network = os.open(f"/proc/{sys.argv[1]}/ns/net", os.O_RDONLY)
libc = ctypes.CDLL(None, use_errno=True)
for namespace in (fcntl.ioctl(network, NS_GET_USERNS), network):
    assert libc.setns(namespace, 0) == 0, os.strerror(ctypes.get_errno())
link = socket.create_connection((sys.argv[2], int(sys.argv[3])), 5)
link.sendall(bytes(5_000_000))
link.shutdown(socket.SHUT_WR)
answer = link.makefile("rb")
print(*struct.unpack("!Q", answer.read(8)), len(answer.read()))
"""


class Machine:
    """A machine's card and the proxy at its other end."""

    def __init__(self, *options: str) -> None:
        self.card, theirs = socket.socketpair()
        with theirs:
            command = [
                sys.executable,
                "-m",
                "provisioner.clouds.local.network.egress_proxy",
                "--fd",
                str(theirs.fileno()),
                *options,
            ]
            self.proxy = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self._stream = b""
        self.arp()

    def arp(self) -> None:
        """Asks for the gateway until it answers: then passt works."""
        question = struct.pack("!HHBBH", 1, 0x800, 6, 4, 1) + frame_maker.MAC + socket.inet_aton(egress.GUEST_ADDRESS)
        question += bytes(6) + socket.inet_aton(egress.GATEWAY)
        self._send(b"\xff" * 6, 0x806, question)
        answer = self.receive(lambda frame: frame[12:14] == b"\x08\x06", BOUND_SECONDS)
        assert answer is not None, "no answer from the gateway"
        assert answer[6:12] == frame_maker.GATEWAY_MAC

    def _send(self, target: bytes, kind: int, payload: bytes) -> None:
        self.send_frame(target + frame_maker.MAC + struct.pack("!H", kind) + payload)

    def send_frame(self, frame: bytes) -> None:
        self.card.sendall(struct.pack("!I", len(frame)) + frame)

    def receive(self, matches: Callable[[bytes], bool], seconds: float) -> bytes | None:
        deadline = time.monotonic() + seconds
        while True:
            while len(self._stream) >= 4 and len(self._stream) >= (end := 4 + int.from_bytes(self._stream[:4], "big")):
                frame, self._stream = self._stream[4:end], self._stream[end:]
                if matches(frame):
                    return frame
            if not select.select([self.card], [], [], max(0, deadline - time.monotonic()))[0]:
                return None
            data = self.card.recv(1 << 16)
            if not data:
                return None
            self._stream += data

    def connect(self, address: str, port: int) -> str:
        """Sends a SYN: "accepted", "refused", or "silence"."""
        source = random.randrange(20000, 60000)

        plain = struct.pack("!HHIIBBHHH", source, port, 1000, 0, 0x50, 0x02, 64000, 0, 0)
        ends = socket.inet_aton(egress.GUEST_ADDRESS) + socket.inet_aton(address)
        summed = frame_maker.checksum(ends + struct.pack("!HH", 6, len(plain)) + plain)
        segment = plain[:16] + struct.pack("!H", summed) + plain[18:]
        self.send_frame(frame_maker.ipv4(6, address, segment))
        mine = struct.pack("!H", source)
        answer = self.receive(lambda frame: frame[23:24] == b"\x06" and frame[36:38] == mine, SILENCE_SECONDS)
        if answer is None:
            return "silence"
        return "refused" if answer[47] & 0x04 else "accepted"

    def datagram(self, address: str, port: int) -> None:
        self.send_frame(frame_maker.udp(address, port, 23456, b"hello"))

    def ping(self, address: str) -> bool:
        """Whether an echo request is answered."""
        self.send_frame(frame_maker.ping(address, 7))
        return self.receive(lambda frame: frame[23:24] == b"\x01", SILENCE_SECONDS) is not None

    def passt(self) -> int:
        pid = self.proxy.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def close(self) -> None:
        """Unplugs the card, as QEMU's end does, and waits for the proxy."""
        self.card.close()
        try:
            self.proxy.wait(BOUND_SECONDS)
        finally:
            self.proxy.kill()
            self.proxy.wait()


@contextlib.contextmanager
def machine(*options: str) -> Iterator[Machine]:
    started = Machine(*options)
    try:
        yield started
    finally:
        started.close()


class Host:
    """Services of the host on one port, on all its addresses: what reaches them is kept."""

    def __init__(self) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.99", 9))  # sends nothing
            self.address: str = probe.getsockname()[0]
        sockets = until(self._listening)
        assert sockets
        self._tcp, self._udp = sockets
        self.port: int = self._tcp.getsockname()[1]

    @staticmethod
    def _listening() -> tuple[socket.socket, socket.socket] | None:
        """Sockets for TCP and UDP on one port; None if another program has that port of UDP."""
        tcp, udp = socket.create_server(("0.0.0.0", 0)), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            udp.bind(tcp.getsockname())
        except OSError:
            tcp.close()
            udp.close()
            return None
        return tcp, udp

    def reached(self, seconds: float = 0.5) -> list[str]:
        """What came in since the last call."""
        protocols = []
        while ready := select.select([self._tcp, self._udp], [], [], seconds)[0]:
            if self._tcp in ready:
                protocols.append("tcp")
                self._tcp.accept()[0].close()
            else:
                protocols.append("udp")
                self._udp.recv(100)
        return protocols

    def serve_sums_after_the_end(self) -> threading.Thread:
        """Answers one connection, after its end of input, with the number of bytes that it sent, and as many zeros."""

        def serve() -> None:
            connection, _ = self._tcp.accept()
            with connection:
                count = 0
                while data := connection.recv(1 << 16):
                    count += len(data)
                connection.sendall(struct.pack("!Q", count) + bytes(count))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        self._tcp.close()
        self._udp.close()


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host()
    yield host
    host.close()


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_an_allowlisted_destination_is_reached(host: Host) -> None:
    with machine("--allow", f"{host.address}/32:{host.port}") as guest:
        assert guest.connect(host.address, host.port) == "accepted"
        assert host.reached() == ["tcp"]


def test_nothing_beside_the_allowlist_is_reached(host: Host) -> None:
    other = Host()
    rules = ["--allow", f"{host.address}/32:{host.port}", "--allow", f"203.0.113.0/24:{other.port}"]
    with contextlib.closing(other), machine(*rules) as guest:
        for port in (host.port, other.port):
            for address in (
                "127.0.0.1",
                "127.8.8.8",
                "0.0.0.0",
                egress.GATEWAY,
                egress.GUEST_ADDRESS,
                "198.51.100.1",
            ):
                assert guest.connect(address, port) != "accepted", f"{address}:{port}"
        assert guest.connect(host.address, other.port) == "silence"  # allowed, but for another network
        assert guest.connect("203.0.113.9", host.port) == "silence"
        assert guest.connect(host.address, 22) == "refused"
        for address in (host.address, "127.0.0.1", "0.0.0.0", egress.GATEWAY, "255.255.255.255"):
            guest.datagram(address, host.port)
        assert not guest.ping(host.address)
        assert not guest.ping(egress.GATEWAY)
        assert host.reached() == []
        assert other.reached() == []


def test_data_flows_both_ways_and_ends_one_way_first(host: Host) -> None:
    served = host.serve_sums_after_the_end()
    with machine("--allow", f"{host.address}/32:{host.port}") as guest:
        arguments = [str(guest.passt()), host.address, str(host.port)]
        done = subprocess.run(
            [sys.executable, "-c", SEND_FROM_INSIDE, *arguments],
            capture_output=True, text=True, timeout=BOUND_SECONDS, check=False,
        )  # fmt: skip
        assert done.stdout == "5000000 5000000\n", done.stderr
    served.join(BOUND_SECONDS)


def test_the_namespace_has_no_card_but_loopback(host: Host) -> None:
    with machine("--allow", f"{host.address}/32:{host.port}") as guest:
        cards = Path(f"/proc/{guest.passt()}/net/dev").read_text().splitlines()[2:]
        assert {card.split(":")[0].strip() for card in cards} <= {"lo", "tunl0", "sit0", "ip6tnl0", "gre0"}
        routes = Path(f"/proc/{guest.passt()}/net/route").read_text().splitlines()[1:]
        assert routes == []


def test_full_internet_reaches_nothing_of_the_host(host: Host) -> None:
    with machine("--full-internet") as guest:
        for address in ("127.0.0.1", "127.8.8.8", "0.0.0.0", "0.1.2.3", host.address, "255.255.255.255"):
            assert guest.connect(address, host.port) == "silence", address
            guest.datagram(address, host.port)
        assert guest.connect(egress.GATEWAY, host.port) != "accepted"
        assert host.reached() == []


def test_it_counts_what_it_connected_and_dropped(host: Host, tmp_path: Path) -> None:
    path = tmp_path / "counters"
    with machine("--allow", f"{host.address}/32:{host.port}", "--counters", str(path)) as guest:
        assert read(path) == Counts()
        assert guest.connect(host.address, host.port) == "accepted"
        assert host.reached() == ["tcp"]
        assert guest.connect("1.1.1.1", 443) != "accepted"
        assert read(path) == Counts(onward=1)
    with machine("--full-internet", "--counters", str(path)) as guest:
        assert guest.connect("169.254.169.254", 80) == "silence"
        assert read(path) == Counts(denied=1)


@pytest.mark.parametrize("options", [("--full-internet",), ("--full-internet", "--private", "10.1.0.0/16")])
def test_a_private_network_is_refused_at_once_unless_it_is_opened(options: tuple[str, ...]) -> None:
    with machine(*options) as guest:
        guest.send_frame(frame_maker.udp("10.1.2.3", 9, 23456, b"hello"))
        guest.send_frame(frame_maker.udp("192.168.1.1", 9, 23456, b"hello"))
        refusal = guest.receive(lambda frame: frame[23:24] == b"\x01", BOUND_SECONDS)
        assert refusal is not None
        quoted = socket.inet_ntoa(refusal[58:62])
        assert quoted == ("192.168.1.1" if "--private" in options else "10.1.2.3")


@pytest.mark.parametrize("options", [("--full-internet",), ("--allow", "203.0.113.7/32:443")])
@pytest.mark.parametrize("victim", ["proxy", "passt", "card"])
def test_no_process_outlives_another(victim: str, options: tuple[str, ...]) -> None:
    with machine(*options) as guest:
        passt = guest.passt()
        if victim == "card":
            guest.card.close()
        else:
            os.kill(passt if victim == "passt" else guest.proxy.pid, signal.SIGKILL)
        until(lambda: is_gone(passt))
        assert (guest.proxy.wait(BOUND_SECONDS) == 0) is (victim == "card")
