"""Root in a machine opens as many TCP connections as it can, to exhaust the host's descriptors and memory.

passt, which keeps them, has a bound of its own, and keeps working when it is reached.
"""

from __future__ import annotations

import socket
import struct
from pathlib import Path

from provisioner.clouds.local.network import egress
from provisioner.clouds.local.network.egress_proxy import PASST_DESCRIPTORS
from tests.local.test_egress_proxy import Host, machine
from tests.unit.clouds.local.network import frame_maker


def syn(address: str, port: int, source: int) -> bytes:
    plain = struct.pack("!HHIIBBHHH", source, port, 1000, 0, 0x50, 0x02, 64000, 0, 0)
    ends = socket.inet_aton(egress.GUEST_ADDRESS) + socket.inet_aton(address)
    summed = frame_maker.checksum(ends + struct.pack("!HH", 6, len(plain)) + plain)
    return frame_maker.ipv4(6, address, plain[:16] + struct.pack("!H", summed) + plain[18:])


def test_three_thousand_connections_take_few_descriptors() -> None:
    host = Host()
    try:
        with machine("--allow", f"{host.address}/32:{host.port}") as guest:
            passt = Path(f"/proc/{guest.passt()}")
            for source in range(20_000, 23_000):
                guest.send_frame(syn(host.address, host.port, source))
            guest.arp()  # which is answered in turn
            limit = (passt / "limits").read_text().split("Max open files")[1].split()[:2]
            assert limit == [str(PASST_DESCRIPTORS)] * 2
            guest.arp()  # it still works
    finally:
        host.close()
