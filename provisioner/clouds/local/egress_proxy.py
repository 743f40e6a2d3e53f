"""Joins one machine's second network card to what it may reach, and to nothing else. Standard library only.

Usage: python -m provisioner.clouds.local.egress_proxy --fd N (--allow CIDR:PORT ... | --full-internet) [--log FILE]

N is one end of a socket pair whose other end is QEMU's `-netdev stream`. passt turns the machine's packets into
sockets; this process starts it, watches over it and ends with it. The machine is hostile: it may send any frame.

--allow: passt runs in a network namespace without any way out, where the allowlisted networks are local addresses
  (AnyIP). What listens there was made in the namespace and handed out to this process, which connects each accepted
  connection to its original destination. IPv4 and TCP only. As the listener accepts first, a destination that
  refuses looks to the machine like a connection that is reset at once.
--full-internet: passt runs beside this process, and frames to the host itself are dropped before passt sees them.
  passt alone does not: `--no-map-gw` closes the gateway's address only, and root in the machine reaches the host's
  loopback by packets sent straight to 127.0.0.1, 0.0.0.0 or one of the host's own addresses.

Either way it ends when QEMU closes its end; passt dies with this process, whatever ends it.
"""

from __future__ import annotations

import argparse
import array
import asyncio
import ctypes
import fcntl
import ipaddress
import os
import pwd
import re
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

# Static configuration of the machine's card: this address, prefix length and default route, no DHCP.
# Not slirp's 10.0.2.0/24, which the management card has.
GUEST_ADDRESS = "10.0.3.15"
PREFIX_LENGTH = 24
GATEWAY = "10.0.3.2"
GATEWAY_MAC = "52:54:00:00:03:02"
# With --full-internet, DNS over UDP to this address goes to the host's resolver (TEST-NET-2: never a real host).
RESOLVER = "198.51.100.53"

# Never reachable and never allowlisted: this host, link-local services (cloud metadata), multicast, reserved.
NEVER = tuple(
    ipaddress.IPv4Network(cidr) for cidr in ("0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/4", "240.0.0.0/4")
)

# A message carries at most 253 descriptors (SCM_MAX_FD), and a socket filter at most 4096 instructions.
MAX_RULES = 200
MAX_CONNECTIONS = 512
CONNECT_SECONDS = 30
IDLE_SECONDS = 3600
CHUNK_BYTES = 1 << 16
MAX_FRAME_BYTES = 1 << 17
HOST_ADDRESSES_SECONDS = 2

# linux/sched.h, linux/prctl.h, linux/sockios.h, linux/rtnetlink.h, linux/filter.h, asm-generic/socket.h
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_RTM_NEWROUTE, _NLM_F_REQUEST_ACK_CREATE = 24, 0x405
_RT_TABLE_LOCAL, _RTPROT_STATIC, _RT_SCOPE_HOST, _RTN_LOCAL, _RTA_DST, _RTA_OIF = 255, 4, 254, 2, 1, 4
_BPF_LOAD_WORD, _BPF_AND, _BPF_JUMP_IF_EQUAL, _BPF_RETURN, _SKF_NET_OFF = 0x20, 0x54, 0x15, 0x06, 0xFFF00000
_SO_ATTACH_FILTER = 26


@dataclass(frozen=True)
class Rule:
    """One allowlisted destination: an IPv4 network and a TCP port."""

    network: ipaddress.IPv4Network
    port: int


def parse_allow(text: str) -> Rule:
    """Reads one allowlisted destination.

    Args:
        text: CIDR:PORT, such as 203.0.113.7/32:443.

    Raises:
        ValueError: it is no IPv4 network and TCP port, or it touches addresses that no machine may reach.
    """
    cidr, _, port = text.rpartition(":")
    if not re.fullmatch(r"[0-9.]+(/[0-9]+)?", cidr) or not re.fullmatch(r"[0-9]{1,5}", port):
        raise ValueError(f"{text!r} is not of the form IPv4-CIDR:PORT")
    network = ipaddress.IPv4Network(cidr)
    if not 1 <= int(port) <= 65535:
        raise ValueError(f"{text!r}: ports are 1 to 65535")
    if forbidden := [str(never) for never in NEVER if never.overlaps(network)]:
        raise ValueError(f"{text!r} overlaps {forbidden[0]}, which is never reachable")
    return Rule(network, int(port))


def allows(rules: Sequence[Rule], address: str, port: int) -> bool:
    """Whether a rule covers this IPv4 address and TCP port."""
    return any(rule.port == port and ipaddress.IPv4Address(address) in rule.network for rule in rules)


def host_networks(fib_trie: str) -> tuple[ipaddress.IPv4Network, ...]:
    """The host's own and broadcast addresses.

    Args:
        fib_trie: the text of /proc/net/fib_trie: an address on one line, `/LENGTH host LOCAL` on those below it.
    """
    found = set()
    address = ""
    for line in fib_trie.splitlines():
        if match := re.match(r"\s*\|-- ([0-9.]+)$", line):
            address = match[1]
        elif match := re.match(r"\s*/([0-9]+) \w+ (?:LOCAL|BROADCAST)\b", line):
            found.add(ipaddress.IPv4Network((address, int(match[1])), strict=False))
    return tuple(sorted(found))


class FrameFilter:
    """Drops what a machine with full internet must not send: all but ARP, and IPv4 to addresses not denied.

    Frames are Ethernet frames, each after its length in 4 bytes, big endian (QEMU's and passt's stream format).
    """

    def __init__(self) -> None:
        """Starts with NEVER alone denied."""
        self._pending = b""
        self._verdicts: dict[bytes, bool] = {}
        self._denied: tuple[ipaddress.IPv4Network, ...] = NEVER

    def deny(self, networks: Sequence[ipaddress.IPv4Network]) -> None:
        """Replaces the networks that are denied besides NEVER."""
        self._denied = (*NEVER, *networks)
        self._verdicts.clear()

    def feed(self, data: bytes) -> bytes:
        """Takes the next bytes of the machine's stream and returns those frames, now complete, that may pass.

        Raises:
            ValueError: a frame is longer than any that QEMU sends; the stream cannot be followed further.
        """
        stream = self._pending + data
        kept, start = [], 0
        while len(stream) - start >= 4:
            length = int.from_bytes(stream[start : start + 4], "big")
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {length} bytes")
            end = start + 4 + length
            if end > len(stream):
                break
            if self._passes(stream[start + 4 : end]):
                kept.append(stream[start:end])
            start = end
        self._pending = stream[start:]
        return b"".join(kept)

    def _passes(self, frame: bytes) -> bool:
        if frame[12:14] == b"\x08\x06":
            return True
        if frame[12:14] != b"\x08\x00" or len(frame) < 34 or frame[14] >> 4 != 4:
            return False
        destination = frame[30:34]
        if destination not in self._verdicts:
            if len(self._verdicts) >= 4096:
                self._verdicts.clear()
            address = ipaddress.IPv4Address(destination)
            self._verdicts[destination] = not any(address in network for network in self._denied)
        return self._verdicts[destination]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs until QEMU or passt ends; returns passt's exit code."""
    parser = argparse.ArgumentParser(prog="relay", description="Joins a machine to what it may reach.")
    parser.add_argument("--fd", type=int, required=True, help="connected stream socket, the other end QEMU's")
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--allow", action="append", metavar="CIDR:PORT", help="an allowlisted destination; repeatable")
    mode.add_argument("--full-internet", action="store_true")
    parser.add_argument("--log", type=Path, help="file for all output, passt's too")
    options = parser.parse_args(arguments)
    try:
        rules = sorted({parse_allow(text) for text in options.allow or ()}, key=str)
    except ValueError as error:
        parser.error(str(error))
    if len(rules) > MAX_RULES:
        parser.error(f"at most {MAX_RULES} destinations")
    qemu = socket.socket(fileno=options.fd)
    if options.log:
        with options.log.open("ab", buffering=0) as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
    _give_up_privileges()
    return asyncio.run(_full_internet(qemu) if options.full_internet else _allowlist(qemu, rules))


def _give_up_privileges() -> None:
    """Becomes nobody if started as root (as passt itself would), and raises the limit on open files."""
    os.chdir("/")
    if os.geteuid() == 0:
        nobody = pwd.getpwnam("nobody")
        os.setgroups([])
        os.setresgid(nobody.pw_gid, nobody.pw_gid, nobody.pw_gid)
        os.setresuid(nobody.pw_uid, nobody.pw_uid, nobody.pw_uid)
    _libc("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _libc(function: str, *arguments: int) -> None:
    """Calls a function of the C library that Python 3.11 does not offer; raises OSError if it fails."""
    libc = ctypes.CDLL(None, use_errno=True)
    # Through c_ulong: these functions are variadic, and the kernel refuses rubbish in the upper halves.
    if getattr(libc, function)(*(ctypes.c_ulong(argument) for argument in arguments)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{function}: {os.strerror(code)}")


def _start_passt(link: socket.socket, options: Sequence[str], prepare: Callable[[], None]) -> int:
    """Forks; the child runs `prepare` and becomes passt on `link`. Returns its pid.

    A fork and not subprocess: the child keeps the namespace's capabilities only until exec, and as nobody it
    might not be able to read the Python that it would need after it.
    """
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        _libc("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it ended before we could ask
            os._exit(1)
        prepare()
        os.set_inheritable(link.fileno(), True)
        command = [
            *("passt", "--foreground", "--quiet", "--ipv4-only", "--fd", str(link.fileno())),
            *("--no-map-gw", "--no-dhcp", "--tcp-ports", "none", "--udp-ports", "none"),
            *("--address", GUEST_ADDRESS, "--netmask", str(PREFIX_LENGTH)),
            *("--gateway", GATEWAY, "--mac-addr", GATEWAY_MAC, *options),
        ]
        os.execvp(command[0], command)  # noqa: S606 - no shell wanted
    except BaseException as error:
        os.write(2, f"passt was not started: {error}\n".encode())
    finally:
        os._exit(1)


async def _until_end(pid: int) -> int:
    """Waits for the child and returns its exit code, 1 for a signal."""
    ended = asyncio.Event()
    descriptor = os.pidfd_open(pid)
    asyncio.get_running_loop().add_reader(descriptor, ended.set)
    await ended.wait()
    asyncio.get_running_loop().remove_reader(descriptor)
    os.close(descriptor)
    return max(1, code) if (code := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])) else 0


async def _full_internet(qemu: socket.socket) -> int:
    """passt beside us, and every frame of the machine through the filter."""
    ours, theirs = socket.socketpair()
    pid = _start_passt(theirs, ["--dns-forward", RESOLVER], qemu.close)
    theirs.close()
    for end in (qemu, ours):
        end.setblocking(False)
    frames = FrameFilter()
    frames.deny(host_networks(Path("/proc/net/fib_trie").read_text()))
    work = (_copy(qemu, ours, frames.feed), _copy(ours, qemu, bytes), _follow_host_addresses(frames))
    tasks = [asyncio.create_task(task) for task in work]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.wait(tasks)
    if errors := [task.exception() for task in done if task.exception()]:
        print(f"link ended: {errors[0]!r}", file=sys.stderr, flush=True)
    ours.close()  # passt ends when its link does
    return await _until_end(pid)


async def _copy(source: socket.socket, sink: socket.socket, change: Callable[[bytes], bytes]) -> None:
    """Copies until the end of `source`, each chunk as `change` returns it."""
    loop = asyncio.get_running_loop()
    while data := await loop.sock_recv(source, CHUNK_BYTES):
        await loop.sock_sendall(sink, change(data))


async def _follow_host_addresses(frames: FrameFilter) -> None:
    """Keeps the filter true while the host gains and loses addresses."""
    while True:
        await asyncio.sleep(HOST_ADDRESSES_SECONDS)
        frames.deny(host_networks(Path("/proc/net/fib_trie").read_text()))


async def _allowlist(qemu: socket.socket, rules: Sequence[Rule]) -> int:
    """passt in a namespace without a way out, its listeners here."""
    ours, theirs = socket.socketpair()

    def prepare() -> None:
        _enter_namespace()
        _make_networks_local({rule.network for rule in rules})
        listeners = [_listen(port, rules) for port in sorted({rule.port for rule in rules})]
        descriptors = array.array("i", (listener.fileno() for listener in listeners))
        theirs.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
        for end in (ours, theirs):
            end.close()

    # lo, because passt takes its template from the default route's card, and there is no such route here.
    options = ["--interface", "lo", "--dns", "none", "--no-udp", "--no-icmp"]
    pid = _start_passt(qemu, options, prepare)
    for end in (theirs, qemu):
        end.close()
    _, descriptors, _, _ = socket.recv_fds(ours, 1, MAX_RULES)
    ours.close()
    slots = asyncio.Semaphore(MAX_CONNECTIONS)
    acceptors = [asyncio.create_task(_accept(socket.socket(fileno=fd), rules, slots)) for fd in descriptors]
    code = await _until_end(pid)
    for acceptor in acceptors:
        acceptor.cancel()
    return code


def _enter_namespace() -> None:
    """Moves this process into a user and network namespace of its own; its user stays what it is."""
    uid, gid = os.getuid(), os.getgid()
    _libc("prctl", _PR_SET_DUMPABLE, 1, 0, 0, 0)  # lost with root; without it /proc/self belongs to root
    _libc("unshare", _CLONE_NEWUSER | _CLONE_NEWNET)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


def _make_networks_local(networks: set[ipaddress.IPv4Network]) -> None:
    """Brings up loopback and makes every address of the networks one of its own: `ip route add local CIDR dev lo`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = bytearray(struct.pack("16sh22x", b"lo", 0))  # struct ifreq
        fcntl.ioctl(control, _SIOCGIFFLAGS, request)
        struct.pack_into("h", request, 16, struct.unpack_from("h", request, 16)[0] | _IFF_UP)
        fcntl.ioctl(control, _SIOCSIFFLAGS, request)
    loopback = socket.if_nametoindex("lo")
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as netlink:
        for network in networks:
            kind = (_RT_TABLE_LOCAL, _RTPROT_STATIC, _RT_SCOPE_HOST, _RTN_LOCAL)
            body = struct.pack("=8BI", socket.AF_INET, network.prefixlen, 0, 0, *kind, 0)
            body += struct.pack("=HH4s", 8, _RTA_DST, network.network_address.packed)
            body += struct.pack("=HHI", 8, _RTA_OIF, loopback)
            netlink.send(struct.pack("=IHHII", 16 + len(body), _RTM_NEWROUTE, _NLM_F_REQUEST_ACK_CREATE, 1, 0) + body)
            error = -struct.unpack_from("=i", netlink.recv(4096), 16)[0]  # NLMSG_ERROR; 0 is the acknowledgement
            if error:
                raise OSError(error, f"route to {network}: {os.strerror(error)}")


def _listen(port: int, rules: Sequence[Rule]) -> socket.socket:
    """A listener on every local address that sees no packet but those to networks allowlisted for its port."""
    steps: list[tuple[int, int, int, int]] = []
    for network in [rule.network for rule in rules if rule.port == port]:
        steps += [
            (_BPF_LOAD_WORD, 0, 0, _SKF_NET_OFF + 16),  # the destination in the IPv4 header
            (_BPF_AND, 0, 0, int(network.netmask)),
            (_BPF_JUMP_IF_EQUAL, 0, 1, int(network.network_address)),
            (_BPF_RETURN, 0, 0, 0xFFFFFFFF),
        ]
    program = b"".join(struct.pack("=HBBI", *step) for step in [*steps, (_BPF_RETURN, 0, 0, 0)])
    code = ctypes.create_string_buffer(program, len(program))
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    attached = struct.pack("@HP", len(steps) + 1, ctypes.addressof(code))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, attached)
    listener.bind(("0.0.0.0", port))  # noqa: S104 - in the closed namespace
    listener.listen(128)
    listener.setblocking(False)
    return listener


async def _accept(listener: socket.socket, rules: Sequence[Rule], slots: asyncio.Semaphore) -> None:
    """Relays every connection that the listener accepts, at most as many at once as there are slots."""
    loop = asyncio.get_running_loop()
    relays = set()
    while True:
        await slots.acquire()
        try:
            accepted, _ = await loop.sock_accept(listener)
        except OSError:  # the machine gave up meanwhile, or the host is out of descriptors
            slots.release()
            await asyncio.sleep(0.1)
            continue
        relay = asyncio.create_task(_relay(accepted, rules))
        relays.add(relay)
        relay.add_done_callback(relays.discard)
        relay.add_done_callback(lambda _: slots.release())


async def _relay(accepted: socket.socket, rules: Sequence[Rule]) -> None:
    """Connects one accepted connection to its original destination and pumps both ways until both have ended."""
    loop = asyncio.get_running_loop()
    with accepted, socket.socket(socket.AF_INET, socket.SOCK_STREAM) as onward:
        for end in (accepted, onward):
            end.setblocking(False)
        destination: tuple[str, int] = accepted.getsockname()
        try:
            if not allows(rules, *destination):
                raise ConnectionRefusedError(f"{destination} is not allowlisted")
            await asyncio.wait_for(loop.sock_connect(onward, destination), CONNECT_SECONDS)
            async with asyncio.timeout(IDLE_SECONDS) as idle, asyncio.TaskGroup() as directions:
                directions.create_task(_pump(accepted, onward, idle))
                directions.create_task(_pump(onward, accepted, idle))
        except* (OSError, TimeoutError):
            for end in (accepted, onward):  # a broken connection must not look like a finished one
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def _pump(source: socket.socket, sink: socket.socket, idle: asyncio.Timeout) -> None:
    """Copies one direction and then ends it, leaving the other open. Every chunk puts off the idle timeout."""
    loop = asyncio.get_running_loop()
    while data := await loop.sock_recv(source, CHUNK_BYTES):
        idle.reschedule(loop.time() + IDLE_SECONDS)
        await loop.sock_sendall(sink, data)
    sink.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    sys.exit(main())
