"""Tests what `ssh` passes on to OpenSSH, and what a machine gets of it, against a real server in this process."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import paramiko
import pytest

from provisioner.base.models import Environment
from provisioner.cli.commands import ssh as command
from provisioner.session import Session
from provisioner.ssh.keys import ed25519_key_pair
from tests.ports import reserved_port
from tests.unit.conftest import CommandLine
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.sshd import Sshd
from tests.unit.fakes.world import environment, up
from tests.waiting import BOUND_SECONDS, until

Ssh = Callable[..., AbstractContextManager[subprocess.Popen[str]]]


@pytest.fixture
def running(session: Session, monkeypatch: pytest.MonkeyPatch) -> Environment:
    running = up(session, environment())
    monkeypatch.setattr(command, "environment_session", lambda _: (session, running))
    return running


@pytest.fixture
def sshd(session: Session, running: Environment) -> Sshd:
    assert isinstance(session.cloud, FakeCloud)
    server = session.cloud.machine(running, "primary").sshd
    until(lambda: server.connections() == 0)  # that by which it came up
    return server


@pytest.fixture
def ssh(provisioner: CommandLine, running: Environment, monkeypatch: pytest.MonkeyPatch) -> Ssh:
    """Starts what `provisioner ssh ENV --user root -- ARGUMENTS` turns into."""
    monkeypatch.setenv("SSH_AUTH_SOCK", "/run/agent")
    became: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execvpe", lambda _, argv, variables: became.append((argv, variables)))

    @contextmanager
    def start(*arguments: str) -> Iterator[subprocess.Popen[str]]:
        with contextlib.suppress(Exception):  # the command expects to have ended there
            provisioner("ssh", running.id, "--user", "root", "--", *arguments)
        argv, variables = became.pop()
        assert "SSH_AUTH_SOCK" not in variables
        process = subprocess.Popen(argv, env=variables, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            yield process
        finally:
            process.terminate()
            process.communicate(timeout=BOUND_SECONDS)

    return start


def connected(host: str, port: int) -> socket.socket | None:
    with contextlib.suppress(ConnectionRefusedError):
        return socket.create_connection((host, port), timeout=BOUND_SECONDS)
    return None


def test_a_port_of_the_machine_is_brought_to_this_hosts_loopback_alone(ssh: Ssh, sshd: Sshd) -> None:
    with reserved_port() as port, socket.create_server(("127.0.0.1", 0)) as service:
        there = f"127.0.0.1:{service.getsockname()[1]}"
        with ssh("-A", "-N", "-L", f"{port}:{there}"):
            client = until(lambda: connected("127.0.0.1", port))
            assert client
            with client, service.accept()[0] as accepted:
                accepted.sendall(b"hello")
                assert client.recv(5) == b"hello"
            assert connected("127.0.0.2", port) is None
            [transport] = [each for each in sshd._transports if each.is_active()]
            here = ("127.0.0.1", 22)
            for kind in ("forwarded-tcpip", "x11", "auth-agent@openssh.com", "session", "direct-tcpip"):
                source = here if kind.endswith("tcpip") or kind == "x11" else None
                with pytest.raises(paramiko.ChannelException):
                    transport.open_channel(kind, here if source else None, source)
    assert connected("127.0.0.1", port) is None


def test_a_port_that_is_taken_here_ends_it(ssh: Ssh) -> None:
    with (
        socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as taken,
        ssh("-N", "-L", f"{taken.getsockname()[1]}:x:80") as process,
    ):
        assert process.wait(BOUND_SECONDS) == 255


def test_no_argument_unpins_the_host_key(ssh: Ssh, sshd: Sshd, tmp_path: Path) -> None:
    sshd.shown_key_pair = ed25519_key_pair()
    (tmp_path / "hosts").write_text(f"* {sshd.shown_key_pair.public}\n")
    before = sshd.logins
    for options in (
        ["-oStrictHostKeyChecking=no", "-oUserKnownHostsFile=/dev/null"],
        ["-oHostKeyAlias=other"],
        [f"-oGlobalKnownHostsFile={tmp_path}/hosts"],
        [f"-oKnownHostsCommand=/bin/cat {tmp_path}/hosts"],
    ):
        with ssh(*options, "true") as process:
            assert process.wait(BOUND_SECONDS) == 255
    assert sshd.logins == before


def test_no_argument_gives_openssh_the_users_agent(ssh: Ssh, sshd: Sshd, tmp_path: Path) -> None:
    before = sshd.logins
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(str(tmp_path / "agent"))
        agent.listen()
        with ssh(f"-oIdentityAgent={tmp_path}/agent", "true") as process:
            until(lambda: process.poll() is not None or select.select([agent], [], [], 0)[0])
        assert not select.select([agent], [], [], 0)[0]
    assert sshd.logins == before + 1
