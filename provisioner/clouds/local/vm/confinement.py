"""Changes what this process may do, by the kernel's means: privileges, namespaces, routes, socket filters.

Standard library only; Linux only. What Python does not offer is called through the C library.

Usage: python -m provisioner.clouds.local.vm.confinement FD PROGRAM [ARGUMENT...]
    becomes a program in a network namespace of its own, with the other end of a machine's management card as FD
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import ipaddress
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, NoReturn

from provisioner.base import child_environment
from provisioner.clouds.local.vm.processes import own_user

# linux/sched.h, linux/prctl.h, linux/sockios.h, linux/rtnetlink.h, linux/filter.h, asm-generic/socket.h
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_RTM_NEWLINK, _RTM_NEWROUTE, _NLM_F_REQUEST_ACK, _NLM_F_CREATE = 16, 24, 5, 0x400
_RTPROT_STATIC, _RTA_DST, _RTA_OIF = 4, 1, 4
# Table, protocol, scope and type of a route: to addresses of this host's, and to a neighbour.
_LOCAL, _NEIGHBOUR = (255, _RTPROT_STATIC, 254, 2), (254, _RTPROT_STATIC, 253, 1)
_IFLA_AF_SPEC, _IFLA_INET_CONF, _IPV4_DEVCONF_RP_FILTER = 26, 1, 8
_IFLA_INET6_ADDR_GEN_MODE, _NO_ADDRESS = 8, b"\1"
_ACCEPTS_ARP = Path("/proc/sys/net/ipv4/conf/all/arp_accept")
_BPF_LOAD_WORD, _BPF_AND, _BPF_JUMP_IF_EQUAL, _BPF_RETURN, _SKF_NET_OFF = 0x20, 0x54, 0x15, 0x06, 0xFFF00000
_SO_ATTACH_FILTER = 26
# linux/if_tun.h, linux/if_arp.h
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 2, 0x1000
_SIOCSIFADDR, _SIOCSIFNETMASK, _SIOCSIFHWADDR, _SIOCSARP = 0x8916, 0x891C, 0x8924, 0x8955
_ARPHRD_ETHER, _ATF_COMPLETE_PERMANENT = 1, 6

# The management card in QEMU's network: its name, and the ends of what it leads to. Ours has the same hardware address
# each time: a machine that resumes still knows it.
CARD, CARD_MAC = "card", "52:54:00:00:02:02"
CARD_ADDRESS, GUEST_ADDRESS, GUEST_MAC = "10.0.2.2", "10.0.2.15", "52:54:00:00:00:01"


def give_up_privileges() -> None:
    """Becomes a user of its own if started as root, leaves its directory, and raises the limit on open files."""
    user = own_user(Path())  # with a group of its own, too: it shares nothing with QEMU
    os.chdir("/")
    if user:
        os.setgroups([])
        os.setresgid(user.gid, user.gid, user.gid)
        os.setresuid(user.uid, user.uid, user.uid)
    _libc("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_open_files(count: int) -> None:
    """Limits how many files and sockets this process, and what it becomes, may have open."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, count))


def end_with_parent(parent: int) -> None:
    """Asks the kernel to kill this process when its parent ends.

    Args:
        parent: the parent's pid.

    Raises:
        ProcessLookupError: the parent ended before the kernel was asked.
    """
    _libc("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        raise ProcessLookupError(f"process {parent} has ended")


def enter_namespace() -> None:
    """Moves this process into a new user and network namespace; its user and group stay the same."""
    uid, gid = os.getuid(), os.getgid()
    _libc("prctl", _PR_SET_DUMPABLE, 1, 0, 0, 0)  # lost with root; without it /proc/self belongs to root
    _libc("unshare", _CLONE_NEWUSER | _CLONE_NEWNET)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


def leave_network() -> None:
    """Moves this process into a new network namespace, with nothing in it but loopback.

    Raises:
        OSError: the kernel forbids it: user namespaces are switched off, or a container lacks CAP_SYS_ADMIN.
    """
    if os.geteuid() == 0:
        _libc("unshare", _CLONE_NEWNET)  # in a user namespace, QEMU could not become another user
    else:
        enter_namespace()
    _bring_up("lo")


def place_for_card() -> BinaryIO:
    """Opens a file of no use, in whose place the process that becomes QEMU has its machine's management card."""
    return Path(os.devnull).open("rb")


def make_card(descriptor: int) -> None:
    """Makes, in this process's network, a card whose other end is a machine's, for the controller to reach the machine.

    The kernel answers what the machine sends there, from its own address alone: machines that claim others would fill
    the table of neighbours, which the host's networks share. Nothing listens, and no other card leads away.

    Args:
        descriptor: an open file of no use, in whose place the machine's end comes (place_for_card).

    Raises:
        OSError: the kernel forbids it, or has no such device.
    """
    if _ACCEPTS_ARP.read_text().strip() != "0":  # as on the host, which may be a router
        _ACCEPTS_ARP.write_text("0")
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", CARD.encode(), _IFF_TAP | _IFF_NO_PI))
    os.dup2(tap, descriptor)
    os.close(tap)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCSIFHWADDR, struct.pack("16s16s8x", CARD.encode(), _hardware(CARD_MAC)))
        for request, address in ((_SIOCSIFADDR, CARD_ADDRESS), (_SIOCSIFNETMASK, "255.255.255.255")):
            fcntl.ioctl(control, request, struct.pack("16s16s8x", CARD.encode(), _protocol(address)))
        _answer_neighbours_only(CARD)
        _bring_up(CARD)
        _add_route(ipaddress.IPv4Network(GUEST_ADDRESS), _NEIGHBOUR, CARD)
        # A machine that has just resumed need not be asked who it is.
        neighbour = struct.pack(
            "16s16si16s", _protocol(GUEST_ADDRESS), _hardware(GUEST_MAC), _ATF_COMPLETE_PERMANENT, bytes(16)
        )
        fcntl.ioctl(control, _SIOCSARP, neighbour + CARD.encode().ljust(16, b"\0"))


def _protocol(address: str) -> bytes:
    """Returns a struct sockaddr_in."""
    return struct.pack("=HH4s8x", socket.AF_INET, 0, socket.inet_aton(address))


def _hardware(mac: str) -> bytes:
    """Returns a struct sockaddr with an Ethernet address."""
    return struct.pack("=H6s8x", _ARPHRD_ETHER, bytes.fromhex(mac.replace(":", "")))


def make_networks_local(networks: Iterable[ipaddress.IPv4Network]) -> None:
    """Brings up loopback and makes every address of the networks local: `ip route add local CIDR dev lo`."""
    _bring_up("lo")
    for network in networks:
        _add_route(network, _LOCAL, "lo")


def _add_route(network: ipaddress.IPv4Network, kind: tuple[int, int, int, int], card: str) -> None:
    body = struct.pack("=8BI", socket.AF_INET, network.prefixlen, 0, 0, *kind, 0)
    body += _attribute(_RTA_DST, network.network_address.packed)
    body += _attribute(_RTA_OIF, struct.pack("=I", socket.if_nametoindex(card)))
    _tell_kernel(_RTM_NEWROUTE, _NLM_F_CREATE, body, f"route to {network}")


def _answer_neighbours_only(card: str) -> None:
    """Has the kernel drop what comes from addresses to which no route leads through the card (rp_filter), and IPv6."""
    settings = _attribute(_IFLA_INET_CONF, _attribute(_IPV4_DEVCONF_RP_FILTER, struct.pack("=I", 1)))
    _set_link(card, socket.AF_INET, settings)
    with contextlib.suppress(OSError):  # a kernel without IPv6
        _set_link(card, socket.AF_INET6, _attribute(_IFLA_INET6_ADDR_GEN_MODE, _NO_ADDRESS))


def _set_link(card: str, family: int, settings: bytes) -> None:
    body = struct.pack("=BxHiII", socket.AF_UNSPEC, 0, socket.if_nametoindex(card), 0, 0)
    body += _attribute(_IFLA_AF_SPEC, _attribute(family, settings))
    _tell_kernel(_RTM_NEWLINK, 0, body, f"settings of {card}")


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def _tell_kernel(kind: int, flags: int, body: bytes, what: str) -> None:
    """Sends the kernel a request about its networks (rtnetlink(7)).

    Raises:
        OSError: it refuses.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as netlink:
        netlink.send(struct.pack("=IHHII", 16 + len(body), kind, _NLM_F_REQUEST_ACK | flags, 1, 0) + body)
        error = -struct.unpack_from("=i", netlink.recv(4096), 16)[0]  # NLMSG_ERROR; 0 is the acknowledgement
        if error:
            raise OSError(error, f"{what}: {os.strerror(error)}")


def _bring_up(card: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = bytearray(struct.pack("16sh22x", card.encode(), 0))  # struct ifreq
        fcntl.ioctl(control, _SIOCGIFFLAGS, request)
        struct.pack_into("h", request, 16, struct.unpack_from("h", request, 16)[0] | _IFF_UP)
        fcntl.ioctl(control, _SIOCSIFFLAGS, request)


def listen(port: int, networks: Iterable[ipaddress.IPv4Network]) -> socket.socket:
    """Listens on every local address, with a socket filter that drops packets to any but these networks."""
    steps: list[tuple[int, int, int, int]] = []
    for network in networks:
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


def _libc(function: str, *arguments: int) -> None:
    """Calls a function of the C library; raises OSError if it fails."""
    libc = ctypes.CDLL(None, use_errno=True)
    # Through c_ulong: these functions are variadic, and the kernel refuses rubbish in the upper halves.
    if getattr(libc, function)(*(ctypes.c_ulong(argument) for argument in arguments)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{function}: {os.strerror(code)}")


def main() -> NoReturn:
    """Leaves the network and becomes the program that the arguments name."""
    descriptor, program, *arguments = sys.argv[1:]
    try:
        leave_network()
        make_card(int(descriptor))
    except OSError as error:
        sys.exit(f"It gets no network of its own; `provisioner doctor` says what is missing: {error}")
    os.execvpe(program, [program, *arguments], child_environment.for_program(os.environ))  # noqa: S606


if __name__ == "__main__":
    main()
