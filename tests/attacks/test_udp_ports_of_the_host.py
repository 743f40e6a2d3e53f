"""Root in a machine with full internet sends UDP from 20,000 ports, and from the port of a program of the host.

The host's ports stay the host's: a bounded number is taken, all of them ephemeral, and no datagram that a program of
the host sends to its own loopback arrives in the machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from provisioner.clouds.local.network.datagrams import MAX_FLOWS
from tests.waiting import BOUND_SECONDS

ROOT = Path(__file__).parents[2]


def test_the_hosts_udp_ports_and_loopback_datagrams_stay_its_own() -> None:
    user = [] if os.geteuid() == 0 else ["--user", "--map-current-user", "--keep-caps"]
    done = subprocess.run(
        ["unshare", *user, "--net", sys.executable, "-m", "tests.attacks.udp_sources"],
        cwd=ROOT, capture_output=True, text=True, timeout=BOUND_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert not seen["stolen"]
    assert seen["free"]
    assert 100 < seen["taken"] <= MAX_FLOWS
    assert 100 < seen["pings"] <= MAX_FLOWS
    assert seen["outside_the_ephemeral_range"] == 0
