"""Root in a machine sends what it likes to the management card, whose other end is a network of QEMU's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from provisioner.clouds.local.vm import confinement
from tests.command_line import ROOT


@pytest.fixture(scope="module")
def said() -> dict[str, object]:
    with confinement.place_for_card() as card:
        number = str(card.fileno())
        python = (sys.executable, "-m")
        command = [*python, confinement.__name__, number, *python, "tests.attacks.management_card", number]
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, pass_fds=[card.fileno()], check=True,
            stdout=subprocess.PIPE,
        )  # fmt: skip
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_the_machine_is_told_at_once_that_nothing_listens(said: dict[str, object]) -> None:
    assert (said["own"], said["port"]) == ("arp", "reset")


@pytest.mark.parametrize("where", ["loopback", "internet"])
def test_nothing_leads_further(said: dict[str, object], where: str) -> None:
    assert said[where] in ("", "icmp")


def test_another_address_than_the_machines_own_is_not_answered(said: dict[str, object]) -> None:
    assert (said["another"], said["spoofed"]) == ("", "")


def test_the_hosts_table_of_neighbours_is_not_filled(said: dict[str, object]) -> None:
    assert said["neighbours"] == [confinement.GUEST_ADDRESS]
