"""Tests booting machines, which show the host key that the cloud announced, and renewing those that resume."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from provisioner.base.errors import MachineLostError
from provisioner.machines import boot
from provisioner.machines.boot import boot_machines
from provisioner.session import Session
from provisioner.ssh.keys import ed25519_key_pair
from tests.unit.fakes.clock import WaitingClock
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.world import created, environment
from tests.waiting import until


def test_the_controller_can_log_in_to_hardened_machines(session: Session, cloud: FakeCloud) -> None:
    [env] = created(session, environment(roles=("primary", "aux")))
    connections = boot_machines(session, env)
    assert {role: connection.login.user for role, connection in connections.items()} == {
        "primary": "root",
        "aux": "root",
    }
    for role, connection in connections.items():
        cloud.machine(env, role).guest.journal = role
        assert connection.run(["journalctl"]).stdout == role.encode()
        connection.close()
    assert cloud.hardened == ["env"]


def test_only_the_host_key_that_the_cloud_reports_is_accepted(session: Session, cloud: FakeCloud) -> None:
    [env] = created(session, environment())
    cloud.machine(env).sshd.shown_key_pair = ed25519_key_pair()
    with pytest.raises(MachineLostError, match="shows a host key that is not the machine's"):
        boot_machines(session, env)
    assert cloud.hardened == []


def test_a_first_boot_with_gpu_drivers_may_take_minutes(
    session: Session, cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, told = WaitingClock(), cloud.host_key
    monkeypatch.setattr(boot, "time", clock)
    monkeypatch.setattr(cloud, "host_key", lambda *about: told(*about) if clock.seconds > 400 else None)
    [env] = created(session, environment())
    for connection in boot_machines(session, env).values():
        connection.close()
    assert cloud.hardened == ["env"]


def test_an_ended_machines_error_shows_its_console(session: Session, cloud: FakeCloud) -> None:
    [env] = created(session, environment())
    cloud.end_machine(env)
    with pytest.raises(MachineLostError, match="The primary machine did not come up") as caught:
        boot_machines(session, env)
    assert (caught.value.details or "").splitlines() == [f"console line {number} of primary" for number in range(5, 20)]


def test_a_machine_out_of_reach_comes_with_the_clouds_advice(
    session: Session, cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boot, "BOOT_SECONDS", 1.0)
    monkeypatch.setattr(cloud, "unreachable_hint", lambda _: "Name your networks.")
    [env] = created(session, environment())
    cloud.machine(env).sshd.is_up = lambda: False
    with pytest.raises(MachineLostError, match="did not come up") as caught:
        boot_machines(session, env)
    assert caught.value.hint == "Name your networks."
    cloud.end_machine(env)
    with pytest.raises(MachineLostError, match="did not come up") as caught:
        boot_machines(session, env)
    assert caught.value.hint is None


def test_when_one_machine_ends_boot_stops_waiting_for_the_others(session: Session, cloud: FakeCloud) -> None:
    [env] = created(session, environment(roles=("primary", "aux")))
    cloud.machine(env, "aux").sshd.is_up = lambda: False
    cloud.end_machine(env, "primary")
    with pytest.raises(MachineLostError, match="The primary machine did not come up"):
        boot_machines(session, env)


def test_no_connection_stays_open_if_hardening_fails(session: Session, cloud: FakeCloud) -> None:
    [env] = created(session, environment())
    cloud.faults.refuses_to_harden = True
    with pytest.raises(MachineLostError, match="could not be hardened"):
        boot_machines(session, env)
    until(lambda: cloud.machine(env).sshd.connections() == 0)


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
