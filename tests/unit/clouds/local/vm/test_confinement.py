"""Tests the program that leaves the network and becomes another one."""

from __future__ import annotations

import os
import subprocess
import sys

# Standard input becomes the end of the management card that is QEMU's.
PROGRAM = [sys.executable, "-m", "provisioner.clouds.local.vm.confinement", "0"]


def test_a_program_gets_loopback_a_card_and_none_of_the_controllers_variables() -> None:
    script = "ip -brief link show up 2>&1 || cat /proc/net/dev; echo SECRET=$SECRET"
    done = subprocess.run(
        [*PROGRAM, "sh", "-c", script], env={**os.environ, "SECRET": "s3cret"}, capture_output=True, text=True,
        check=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    *links, secret = done.stdout.splitlines()
    assert [line.split()[0] for line in links] == ["lo", "card"]
    assert secret == "SECRET="


def test_a_program_keeps_the_files_that_it_inherits_and_its_own_exit_code() -> None:
    reads, writes = os.pipe()
    with os.fdopen(reads, "rb") as output:
        done = subprocess.run(
            [*PROGRAM, "bash", "-c", f"echo kept >&{writes}; exit 7"],
            pass_fds=[writes],
            check=False,
            stdin=subprocess.DEVNULL,
        )
        os.close(writes)
        assert (done.returncode, output.read()) == (7, b"kept\n")
