"""Tests the program that gives a machine new keys after it resumed from a snapshot."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from provisioner.machines import boot

# Stands in for what takes credentials from the host.
CREDENTIALS = """
umask 077
mkdir "$1"
cd "$1"
echo 1234 > expires_at
echo new > host_key
echo agents > authorized_keys.agent
"""


@pytest.mark.parametrize("code", [0, 3], ids=["timer set", "timer not set"])
def test_a_machine_takes_its_new_keys_and_tells_sshd(tmp_path: Path, code: int) -> None:
    keys = tmp_path / "ssh"
    (keys / "authorized_keys.d").mkdir(parents=True)
    for name in ("ssh_host_ed25519_key", "ssh_host_ed25519_key.pub", "authorized_keys.d/agent"):
        (keys / name).write_text("frozen\n")
    (tmp_path / "credentials").write_text(CREDENTIALS)
    program = boot._RENEW.replace('"perl", "/usr/lib/provisioner/credentials.pl"', f'"sh", "{tmp_path}/credentials"')
    for path, stand_in in (
        ("/run/provisioner-renewal", "given"),
        ("/etc/ssh", "ssh"),
        ("/run/sshd.pid", "sshd.pid"),
        ("/proc/sys/kernel/random/boot_id", "boot_id"),
    ):
        program = program.replace(path, str(tmp_path / stand_in))
    with subprocess.Popen(["sleep", "60"]) as sshd:
        (tmp_path / "sshd.pid").write_text(f"{sshd.pid}\n")
        timer = f'echo $1 $2 > "{tmp_path}/timer"; exit {code}'
        assert subprocess.run([sys.executable, "-I", "-c", program, timer], check=False).returncode == code
    assert sshd.returncode == -signal.SIGHUP
    assert (tmp_path / "timer").read_text() == "1234 move\n"
    written = {str(path.relative_to(keys)): path.read_text() for path in keys.rglob("*") if path.is_file()}
    assert written == {"ssh_host_ed25519_key": "new\n", "authorized_keys.d/agent": "agents\n"}
    assert (keys / "ssh_host_ed25519_key").stat().st_mode & 0o777 == 0o600
    assert not (tmp_path / "given").exists()
