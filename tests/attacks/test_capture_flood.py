"""A machine floods its link: QEMU's capture ends at its bound, and is a capture of whole packets all the same.

The real QEMU, with no machine to speak of: its hub passes on what comes in, and so captures it.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from provisioner.clouds.local.network import captures
from provisioner.clouds.local.vm import confinement, qemu
from provisioner.recording import packets
from tests.waiting import BOUND_SECONDS

LINK = (("link-web.sock", "web.sock"), ("link-db.sock", "db.sock"))
FRAME = b"\x52\x54\0\0\0\x02" + b"\x52\x54\0\0\0\x03" + b"\x08\0" + b"flood" * 290
MIB = 1 << 20
CONFINED = (sys.executable, "-m", confinement.__name__)


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    monkeypatch.chdir(tmp_path)
    Path(qemu.RUN).mkdir()
    argv = [qemu.PROGRAM, "-nodefaults", "-no-user-config", "-display", "none", "-machine", "q35", "-accel", "tcg"]
    argv += ["-m", "32M", "-qmp", "unix:run/qmp.sock,server=on,wait=off", *qemu.confined(None)]
    with confinement.place_for_card() as file:
        card = file.fileno()
        argv += [*qemu.network(LINK, card, None), *qemu.captured(LINK, None)]
        started = subprocess.Popen([*CONFINED, str(card), *argv], stdin=subprocess.DEVNULL, pass_fds=[card])
    with started as process:
        try:
            with qemu.wait_for_qmp(lambda: process.poll() is None, time.monotonic() + BOUND_SECONDS):
                pass
            yield process
        finally:
            process.kill()


def test_a_flood_of_packets_leaves_a_bounded_capture(running: subprocess.Popen[bytes]) -> None:
    watched, file = captures.Captures(Path.cwd(), BOUND_SECONDS), captures.path(Path.cwd(), "link")
    largest = sent = 0
    pause = 0.5
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as web,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as db,
    ):
        db.bind("db.sock")  # nothing reads it: what the hub passes on there is dropped
        web.connect("link-web.sock")
        web.settimeout(BOUND_SECONDS)
        looked = time.monotonic()
        while sent < 4 * packets.LIMIT_BYTES and not (sent > packets.LIMIT_BYTES and largest > packets.LIMIT_BYTES):
            sent += web.send(FRAME)
            if time.monotonic() - looked > pause:
                largest = max(largest, file.stat().st_blocks * 512)
                pause = captures.FAST_LOOK_SECONDS if watched.look() else 0.5
                looked = time.monotonic()
        watched.look()
        for _ in range(2000):  # no longer captured
            web.send(FRAME)
        time.sleep(0.5)
    assert running.poll() is None
    assert file.stat().st_size == packets.LIMIT_BYTES
    with qemu.QMP() as control:
        assert "capture" not in str(control.execute("qom-list", path="/objects"))
    capture = packets.whole(file.read_bytes())
    assert packets.LIMIT_BYTES - len(capture) < 3000
    assert all(frame == FRAME for _, frame in packets.packets(capture))
    assert file.stat().st_blocks * 512 < packets.LIMIT_BYTES + MIB
