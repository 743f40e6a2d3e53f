"""QEMU's arguments for a machine's cards: where each leads, and whether it is captured. Pure; standard library only."""

from __future__ import annotations

from collections.abc import Sequence

MANAGEMENT_MAC = "52:54:00:00:00:01"
PRIVATE_MAC = "52:54:00:00:00:02"
INTERNET_MAC = "52:54:00:00:00:03"
PRIMARY = "primary"
# Of a packet. The cards offer no offloading, so none is longer than Ethernet's frames.
CAPTURED_BYTES = 2048

# A machine's sockets of the private link, each with the path of its other end.
Link = tuple[tuple[str, str], ...]


def link_sockets(role: str, peers: Sequence[str]) -> Link:
    """Returns a machine's sockets of the private link, each with its other end, relative to the machine's directory.

    Two machines send to each other. Where there are more, each sends to the primary machine's QEMU, which passes on
    what it gets from one to all others, and so is the link's hub.

    Args:
        peers: the roles of the environment's other machines.
    """
    if len(peers) < 2:
        return tuple(("link.sock", f"../{peer}/link.sock") for peer in peers)
    if role != PRIMARY:
        return (("link.sock", f"../{PRIMARY}/link-{role}.sock"),)
    return tuple((f"link-{peer}.sock", f"../{peer}/link.sock") for peer in sorted(peers))


def network(link: Link, internet_fd: int | None) -> list[str]:
    """Returns the arguments that give a machine its cards, and each card the one place that it leads to.

    Args:
        link, internet_fd: as in Launch.
    """
    argv = ["-netdev", "user,id=management,ipv6=off,restrict=on,hostfwd=tcp:127.0.0.1:0-:22"]
    argv += ["-device", _card("management", MANAGEMENT_MAC)]
    for name, (own, peer) in zip(link_names(link), link, strict=True):
        argv += ["-netdev", f"dgram,id={name},local.type=unix,local.path={own},remote.type=unix,remote.path={peer}"]
        if len(link) > 1:
            argv += ["-netdev", f"hubport,id=hub-{name},hubid=0,netdev={name}"]
    if len(link) > 1:
        argv += ["-netdev", "hubport,id=link,hubid=0"]
    if link:
        argv += ["-device", _card("link", PRIVATE_MAC)]
    if internet_fd is not None:
        argv += ["-netdev", f"stream,id=internet,server=off,addr.type=fd,addr.str={internet_fd}"]
        argv += ["-device", _card("internet", INTERNET_MAC)]
    return argv


def captured(link: Link, internet_fd: int | None) -> list[str]:
    """Returns the arguments that have QEMU write what the cards carry to files, but for the management card's SSH.

    Args:
        link, internet_fd: as in Launch.
    """
    cards = [*(["link"] if link else ()), *(["internet"] if internet_fd is not None else ())]
    argv = []
    for card in cards:
        file = f"file={card}.pcap,maxlen={CAPTURED_BYTES}"
        argv += ["-object", f"filter-dump,id={capture_name(card)},netdev={card},{file}"]
    return argv


def capture_name(card: str) -> str:
    """Returns QEMU's name for the capture of a card."""
    return f"capture-{card}"


def link_names(link: Link) -> list[str]:
    """Returns how QEMU names each socket of the private link."""
    return ["link"] if len(link) == 1 else [f"link{number}" for number in range(len(link))]


def _card(netdev: str, mac: str) -> str:
    return f"virtio-net-pci,netdev={netdev},mac={mac},romfile="
