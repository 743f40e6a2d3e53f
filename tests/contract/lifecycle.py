"""The life of an environment that every cloud must pass, from the moment it is up; with machines of any permission."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from provisioner.base.clock import now
from provisioner.base.errors import MachineLostError, ProvisionerError
from provisioner.base.models import Environment, Role
from provisioner.environment import lifecycle
from provisioner.environment.agent import AgentCommand, run_agent
from provisioner.machines.connect import connect
from provisioner.session import Session

AGENT = AgentCommand(Path(__file__).parent / "agents" / "writer", "bash write.sh")


def live_and_end(
    session: Session, environment: Environment, also: Callable[[Session, Environment], None] = lambda *_: None
) -> None:
    """Checks that an environment is scored, ends at its limit, and leaves nothing.

    Args:
        environment: of a family whose score is the number that was submitted.
        also: what else to check while it is new.
    """
    try:
        assert session.environments.find(environment.id[-6:]).status == "ready"
        assert environment.probes
        also(session, environment)
        _assert_no_builder_is_let_in(session, environment)
        _assert_calls_are_the_exec_servers(session, environment)
        if session.cloud.name == "aws":
            _assert_it_booted_as_on_ec2(session, environment)
        if not environment.has_way_out:
            _assert_root_was_probed_through_each_card(session, environment)
        done = run_agent(session, environment, AGENT)
        assert (done.exit_code, done.stdout) == (0, b"agent\n/home/agent/scaffolding\n")
        assert lifecycle.score(session, environment, readmit_agent=True)[1].score == 0.75
        with connect(session, environment, "primary") as connection:
            assert connection.run(["sh", "-c", "echo out; echo err >&2; exit 3"], user="agent").exit_code == 3
        longer = lifecycle.extend(session, environment, timedelta(hours=1))
        assert longer.expires_at == environment.expires_at + timedelta(hours=1)
        if session.cloud.name == "aws":  # tests/local/test_templates.py reboots local machines
            for role in environment.machines:
                _assert_a_rebooted_machine_is_the_same(session, longer, role)
            assert lifecycle.score(session, longer, "0.25", readmit_agent=True)[1].score == 0.25
        _end_at_its_limit(session, longer)
    finally:
        lifecycle.destroy(session, environment)
    lifecycle.destroy(session, environment)
    assert session.cloud.remaining(environment) == []
    assert not session.environments.directory(environment.id).exists()
    assert not (session.home.stacks / environment.stack).exists()
    [entry] = [entry for entry in session.ledger.entries() if entry.environment == environment.id]
    assert entry.actual_micro_usd is not None


def _assert_no_builder_is_let_in(session: Session, environment: Environment) -> None:
    """Checks that nothing of the builders, of the base image's and the family's, is on the disk."""
    script = "cat /root/.ssh/authorized_keys /home/*/.ssh/authorized_keys /etc/ssh/authorized_keys.d/*; true"
    with connect(session, environment, "primary") as connection:
        keys = connection.run(["sh", "-c", script]).stdout.decode()
        instances = connection.run(["ls", "/var/lib/cloud/instances"]).stdout.decode().split()
    controller = session.environments.key(environment.id, "controller").public.split()[1]
    assert [line for line in keys.splitlines() if line.strip() and controller not in line] == []
    assert instances == ([] if session.cloud.name == "local" else [environment.endpoints["primary"].instance_id])


def _assert_calls_are_the_exec_servers(session: Session, environment: Environment) -> None:
    """A machine without the server would be sent one for each call, over an ordinary session of sshd's."""
    service = "systemctl is-active provisioner-exec; systemctl show --property=MainPID --value provisioner-exec"
    parents = 'pid=$$; while [ $pid -gt 1 ]; do pid=$(cut -d" " -f4 /proc/$pid/stat); echo $pid; done'
    for role in environment.machines:
        with connect(session, environment, role) as connection:
            state, server, *ancestors = connection.run(["sh", "-c", f"{service}; {parents}"]).stdout.decode().split()
        assert state == "active"
        assert server in ancestors


def _assert_it_booted_as_on_ec2(session: Session, environment: Environment) -> None:
    """Checks what the tests' EC2 has in common with the real one: cloud-init's source, the card's name and MTU."""
    with connect(session, environment, "primary") as connection:
        source = connection.run(["cat", "/var/lib/cloud/instance/datasource"]).stdout.decode()
        cards = connection.run(["ls", "/sys/class/net"]).stdout.decode().split()
        sizes = connection.run(["cat", "/sys/class/net/ens5/mtu", "/proc/sys/net/ipv4/tcp_mtu_probing"]).stdout.split()
    assert source.startswith("DataSourceEc2")
    assert set(cards) - {"docker0"} == {"ens5", "lo"}
    # Packets that are too large for the controller's path are found out without the ICMP that no ACL lets in.
    assert sizes == [b"9001", b"1"]


def _assert_root_was_probed_through_each_card(session: Session, environment: Environment) -> None:
    """Checks that root of each offline machine tried to get out with a route of its own through each of its cards."""
    router = session.cloud.gateways[environment.full_internet][0]
    for role in environment.machines:
        neighbours = [end.private_address for other, end in environment.endpoints.items() if other != role]
        through = {card: set[str]() for card in (router, *neighbours) if card}
        for probe in environment.probes:
            name, _, card = probe.probe.partition(" through the card to ")
            if card and (probe.machine, probe.user) == (role, "root"):
                assert not probe.reached, name
                through[card].add(name)
        for names in through.values():
            assert {"tcp 1.1.1.1:443", "dns udp 8.8.8.8", "ping 1.1.1.1", "metadata 169.254.169.254"} <= names
            assert f"controller's loopback at {router} by udp" in names


def _assert_a_rebooted_machine_is_the_same(session: Session, environment: Environment, role: Role) -> None:
    """Reboots a machine, whose metadata service is off, and logs in with the host key that was pinned."""
    boot = ["cat", "/proc/sys/kernel/random/boot_id"]
    users = ["sh", "-c", "cat /etc/passwd /etc/shadow /etc/sudoers.d/* /etc/hosts /root/.ssh/authorized_keys"]
    with connect(session, environment, role) as connection:
        before, known = connection.run(boot).stdout, connection.run(users).stdout
        connection.run(["systemd-run", "--on-active=1", "systemctl", "reboot"])
    deadline = time.monotonic() + 300
    while True:
        assert time.monotonic() < deadline
        with contextlib.suppress(ProvisionerError), connect(session, environment, role) as connection:
            if connection.run(boot).stdout != before:
                break
        time.sleep(2)
    with connect(session, environment, role) as connection:
        assert connection.run(users).stdout == known
        # cloud-init, which would find no metadata and so take it for another machine, took no part.
        assert b"disabled" in connection.run(["cloud-init", "status"]).stdout
        script = "until systemctl is-active -q provisioner-ttl.timer; do sleep 0.5; done; cat /var/lib/provisioner-ttl"
        left = int(connection.run(["sh", "-c", script]).stdout) - environment.expires_at.timestamp()
        assert abs(left) <= 1


def _end_at_its_limit(session: Session, environment: Environment) -> None:
    """Checks that a machine ends at its time even if root in it tries to prevent that and a command is running."""
    with connect(session, environment, "primary") as connection:
        stopped = connection.run(["systemctl", "stop", "provisioner-ttl.timer"])
        assert stopped.exit_code == 0, stopped.stderr
        session.cloud.move_ttl(session.environments.update(environment, expires_at=now() + timedelta(seconds=10)))
        # A watchdog looks twice a second; the scheduler of the tests' account acts less often.
        with pytest.raises(MachineLostError):
            connection.run(["sleep", "180"])
    deadline = time.monotonic() + 30
    while session.cloud.alive(environment, "primary") and time.monotonic() < deadline:
        time.sleep(0.2)
    with pytest.raises(MachineLostError, match="no longer running"):
        connect(session, environment, "primary")
