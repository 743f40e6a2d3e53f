"""Connects one machine's internet card to what it may reach, and to nothing else. Standard library only.

Usage: python -m provisioner.clouds.local.network.egress_proxy --fd N [--counters FILE] [--resolvers FILE]
           (--allow CIDR:PORT ... | --full-internet [--private CIDR ...])

N is one end of a socket pair whose other end is QEMU's `-netdev stream`. passt turns the machine's packets into
sockets; this process starts it, watches over it and ends with it. The machine is hostile: it may send any frame.

--allow: passt runs in a network namespace with no way out, where the allowlisted networks are local addresses
  (AnyIP). The listeners are created in the namespace and handed to this process, which connects each accepted
  connection to its original destination. IPv4 and TCP only. Since the listener accepts first, a destination that
  refuses looks to the machine like a connection that is reset at once.
--full-internet: passt runs beside this process and carries TCP. Frames to the host itself and to private networks, but
  for those that --private names, are refused before passt sees them. passt alone does not do that: `--no-map-gw` closes
  the gateway's address only, and root in the machine reaches the host's loopback by packets sent straight to 127.0.0.1,
  0.0.0.0 or one of the host's own addresses. UDP and pings are carried here (datagrams.py): passt would bind each of
  the machine's ports on all addresses of the host.

Either way it ends when QEMU closes its end, and passt is killed when this process ends, whatever ends it.
"""

from __future__ import annotations

import argparse
import array
import asyncio
import ipaddress
import os
import signal
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from provisioner.base import child_environment
from provisioner.clouds.local.network import egress
from provisioner.clouds.local.network.datagrams import DatagramFlows, Resolvers, parse_resolv_conf, refuse
from provisioner.clouds.local.network.egress import Counters, FrameFilter, Rule
from provisioner.clouds.local.vm import confinement

# Answers that wait while QEMU is busy; more are dropped, as a network does.
MAX_WAITING = 256


class Card:
    """The stream socket whose other end is QEMU's. Nothing is ever written into the middle of another frame.

    Args:
        qemu: non-blocking.
    """

    def __init__(self, qemu: socket.socket) -> None:
        self._qemu = qemu
        self._turn = asyncio.Lock()
        self._waiting: deque[bytes] = deque()
        self._has_waiting = asyncio.Event()

    def offer(self, frame: bytes) -> None:
        """Queues one frame."""
        if len(self._waiting) < MAX_WAITING:
            self._waiting.append(len(frame).to_bytes(4, "big") + frame)
            self._has_waiting.set()

    async def write_offered(self) -> None:
        """Writes the queued frames, until it is cancelled."""
        while await self._has_waiting.wait():
            frames = b"".join(self._waiting)
            self._waiting.clear()
            self._has_waiting.clear()
            await self._write(frames)

    async def copy(self, passt: socket.socket) -> None:
        """Copies those of passt's frames that are for the machine, until the end of its stream.

        Raises:
            ValueError: the stream cannot be followed.
        """
        loop = asyncio.get_running_loop()
        pending = b""
        while data := await loop.sock_recv(passt, egress.CHUNK_BYTES):
            frames, pending = egress.sift(pending + data, egress.is_for_machine)
            await self._write(frames)
            await asyncio.sleep(0)

    async def _write(self, frames: bytes) -> None:
        async with self._turn:
            await asyncio.get_running_loop().sock_sendall(self._qemu, frames)


MAX_CONNECTIONS = 512
CONNECT_SECONDS = 30
IDLE_SECONDS = 3600
HOST_ADDRESSES_SECONDS = 2
# passt uses up to two descriptors for a connection, and refuses further connections when none is left.
PASST_DESCRIPTORS = 1024
HOST_ADDRESSES = Path("/proc/net/fib_trie")
RESOLV_CONF_BYTES = 64 << 10


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs until QEMU or passt ends; returns passt's exit code."""
    parser = argparse.ArgumentParser(prog="egress_proxy", description="Connects a machine to what it may reach.")
    parser.add_argument("--fd", type=int, required=True, help="connected stream socket, the other end QEMU's")
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--allow", action="append", metavar="CIDR:PORT", help="an allowlisted destination; repeatable")
    mode.add_argument("--full-internet", action="store_true")
    parser.add_argument("--private", action="append", default=[], metavar="CIDR", type=ipaddress.IPv4Network)
    parser.add_argument("--counters", type=Path, help="file for what it counts")
    parser.add_argument("--resolvers", type=Path, default=egress.RESOLV_CONF, help="file like /etc/resolv.conf")
    options = parser.parse_args(arguments)
    try:
        rules = sorted({egress.parse_allow(text) for text in options.allow or ()}, key=str)
    except ValueError as error:
        parser.error(str(error))
    if len(rules) > egress.MAX_RULES:
        parser.error(f"at most {egress.MAX_RULES} destinations")
    qemu = socket.socket(fileno=options.fd)
    counters = Counters(options.counters)
    try:
        resolv_conf = os.open(options.resolvers, os.O_RDONLY)
    except OSError:  # a host without it
        resolv_conf = os.open(os.devnull, os.O_RDONLY)
    confinement.give_up_privileges()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the kernel lets a namespace's first process ignore it
    return asyncio.run(
        _full_internet(qemu, counters, options.private, resolv_conf)
        if options.full_internet
        else _allowlist(qemu, rules, counters)
    )


def _start_passt(link: socket.socket, options: Sequence[str], prepare: Callable[[], None]) -> int:
    """Forks; the child runs `prepare` and becomes passt on `link`. Returns its pid.

    A fork and not subprocess: the child keeps the namespace's capabilities only until exec, and after it, as the user
    nobody, it might not be able to read Python's files.
    """
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        confinement.end_with_parent(parent)
        prepare()
        confinement.limit_open_files(PASST_DESCRIPTORS)
        os.set_inheritable(link.fileno(), True)
        command = [
            *("passt", "--foreground", "--quiet", "--ipv4-only", "--fd", str(link.fileno())),
            *("--no-map-gw", "--no-dhcp", "--dns", "none", "--tcp-ports", "none", "--no-udp", "--no-icmp"),
            *("--address", egress.GUEST_ADDRESS, "--netmask", str(egress.PREFIX_LENGTH)),
            *("--gateway", egress.GATEWAY, "--mac-addr", egress.GATEWAY_MAC, *options),
        ]
        os.execvpe(command[0], command, child_environment.for_program(os.environ))  # noqa: S606 - no shell wanted
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


async def _full_internet(
    qemu: socket.socket, counters: Counters, private: Sequence[ipaddress.IPv4Network], resolv_conf: int
) -> int:
    """Runs passt on a second socket pair, and passes every frame of the machine through the filter.

    The way out: QEMU, `frames`, and then passt or `flows`. The way in: passt or `flows`, `card`, QEMU.
    """
    ours, theirs = socket.socketpair()
    pid = _start_passt(theirs, [], qemu.close)
    theirs.close()
    for end in (qemu, ours):
        end.setblocking(False)
    card, resolvers = Card(qemu), Resolvers()
    flows = DatagramFlows(card.offer, resolvers)
    frames = FrameFilter(flows.forward, private, lambda frame: refuse(frame, card.offer))
    _read_host(frames, resolvers, resolv_conf)
    work = (_filter(qemu, ours, frames, counters), card.copy(ours), card.write_offered(), flows.expire())
    tasks = [asyncio.create_task(task) for task in (*work, _follow_host(frames, resolvers, resolv_conf))]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.wait(tasks)
    if errors := [task.exception() for task in done if task.exception()]:
        print(f"link ended: {errors[0]!r}", file=sys.stderr, flush=True)
    ours.close()  # passt ends when its link does
    return await _until_end(pid)


async def _filter(qemu: socket.socket, passt: socket.socket, frames: FrameFilter, counters: Counters) -> None:
    """Copies to passt, until QEMU closes its end, what the filter lets through."""
    loop = asyncio.get_running_loop()
    while data := await loop.sock_recv(qemu, egress.CHUNK_BYTES):
        await loop.sock_sendall(passt, frames.feed(data))
        counters.frames_denied(frames.denied)
        await asyncio.sleep(0)  # a machine that sends without end must not keep all else from its turn


def _read_host(frames: FrameFilter, resolvers: Resolvers, resolv_conf: int) -> None:
    frames.deny(*egress.host_networks(HOST_ADDRESSES.read_text()))
    resolvers.replace(parse_resolv_conf(os.pread(resolv_conf, RESOLV_CONF_BYTES, 0).decode(errors="replace")))


async def _follow_host(frames: FrameFilter, resolvers: Resolvers, resolv_conf: int) -> None:
    """Follows the host while it gains and loses addresses and resolvers."""
    while True:
        await asyncio.sleep(HOST_ADDRESSES_SECONDS)
        _read_host(frames, resolvers, resolv_conf)


async def _allowlist(qemu: socket.socket, rules: Sequence[Rule], counters: Counters) -> int:
    """Runs passt in a namespace with no way out, and serves its listeners here."""
    ours, theirs = socket.socketpair()

    def prepare() -> None:
        confinement.enter_namespace()
        confinement.make_networks_local({rule.network for rule in rules})
        ports = sorted({rule.port for rule in rules})
        listeners = [confinement.listen(port, [rule.network for rule in rules if rule.port == port]) for port in ports]
        descriptors = array.array("i", (listener.fileno() for listener in listeners))
        theirs.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
        for end in (ours, theirs):
            end.close()

    # lo, because passt copies the configuration of the default route's card, and there is no such route here.
    options = ["--interface", "lo"]
    pid = _start_passt(qemu, options, prepare)
    for end in (theirs, qemu):
        end.close()
    _, descriptors, _, _ = socket.recv_fds(ours, 1, egress.MAX_RULES)
    ours.close()
    slots = asyncio.Semaphore(MAX_CONNECTIONS)
    acceptors = [asyncio.create_task(_accept(socket.socket(fileno=fd), rules, slots, counters)) for fd in descriptors]
    code = await _until_end(pid)
    for acceptor in acceptors:
        acceptor.cancel()
    return code


async def _accept(listener: socket.socket, rules: Sequence[Rule], slots: asyncio.Semaphore, counters: Counters) -> None:
    """Forwards every connection that the listener accepts, at most as many at once as there are slots."""
    loop = asyncio.get_running_loop()
    connections = set()
    while True:
        await slots.acquire()
        try:
            accepted, _ = await loop.sock_accept(listener)
        except OSError:  # the machine gave up in the meantime, or the host is out of descriptors
            slots.release()
            await asyncio.sleep(0.1)
            continue
        connection = asyncio.create_task(_forward(accepted, rules, counters))
        connections.add(connection)
        connection.add_done_callback(connections.discard)
        connection.add_done_callback(lambda _: slots.release())


async def _forward(accepted: socket.socket, rules: Sequence[Rule], counters: Counters) -> None:
    """Connects one accepted connection to its original destination, and copies both ways until both have ended."""
    loop = asyncio.get_running_loop()
    with accepted, socket.socket(socket.AF_INET, socket.SOCK_STREAM) as onward:
        for end in (accepted, onward):
            end.setblocking(False)
        destination: tuple[str, int] = accepted.getsockname()
        try:
            if not egress.allows(rules, *destination):
                raise ConnectionRefusedError(f"{destination} is not allowlisted")
            # Not asyncio.wait_for: before Python 3.12 it loses a cancellation that comes as the connection is made, and
            # the proxy would outlive its machine for as long as the connection is idle.
            async with asyncio.timeout(CONNECT_SECONDS):
                await loop.sock_connect(onward, destination)
            counters.connected(is_allowed=egress.allows(rules, *onward.getpeername()))
            async with asyncio.timeout(IDLE_SECONDS) as idle, asyncio.TaskGroup() as directions:
                directions.create_task(_pump(accepted, onward, idle))
                directions.create_task(_pump(onward, accepted, idle))
        except* (OSError, TimeoutError):
            for end in (accepted, onward):  # a broken connection must not look like a finished one
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def _pump(source: socket.socket, sink: socket.socket, idle: asyncio.Timeout) -> None:
    """Copies one direction and then ends it, leaving the other open. Every chunk restarts the idle timeout."""
    loop = asyncio.get_running_loop()
    while data := await loop.sock_recv(source, egress.CHUNK_BYTES):
        idle.reschedule(loop.time() + IDLE_SECONDS)
        await loop.sock_sendall(sink, data)
    sink.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    sys.exit(main())
