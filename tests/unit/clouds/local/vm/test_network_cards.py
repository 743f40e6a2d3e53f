"""Tests which cards of a machine are captured. Where they lead, test_qemu.py tests."""

from __future__ import annotations

from provisioner.clouds.local.network import captures
from provisioner.clouds.local.vm.qemu import captured

LINK = (("link.sock", "../aux/link.sock"),)


def test_two_cards_are_captured_and_management_never() -> None:
    assert captured((), None) == []
    assert captured(LINK, 5) == [
        *("-object", "filter-dump,id=capture-link,netdev=link,file=link.pcap,maxlen=2048"),
        *("-object", "filter-dump,id=capture-internet,netdev=internet,file=internet.pcap,maxlen=2048"),
    ]
    assert captured((*LINK, *LINK), None)[1].startswith("filter-dump,id=capture-link,netdev=link,")
    assert set(captures.CARDS) == {"link", "internet"}
