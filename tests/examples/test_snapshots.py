"""Freezes an environment of two machines while it runs, brings up two copies, and reads the recordings."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from functools import partial

import pytest

from provisioner.base.errors import MachineLostError
from provisioner.base.models import Environment, Role
from provisioner.machines.connect import connect
from provisioner.recording import packets
from provisioner.session import Session
from provisioner.ssh.connection import Connection
from provisioner.store.environments import EnvironmentStore
from provisioner.store.home import Home
from provisioner.store.snapshots import SnapshotStore
from tests.command_line import ROOT, answer, provisioner, started

pytestmark = pytest.mark.vm
EXAMPLES = ROOT / "examples"
AGENTS = EXAMPLES / "container_escape_agents"
SNAPSHOT = "tested"
CLOCK_SECONDS = 0.5
# From the beginning of the call that sends the flag.
SENT_SECONDS = 60

# One connection for ever: a client that breaks it gets no other.
SERVER = r"""
import socket
listening = socket.create_server(("", 5000))
connection = listening.accept()[0]
listening.close()
while data := connection.recv(100):
    connection.sendall(data)
"""
CLIENT = r"""
import itertools, os, secrets, socket, time
connection = socket.create_connection(("aux", 5000))
for number in itertools.count():
    connection.sendall(b"%d\n" % number)
    assert int(connection.recv(100)) == number
    with open("/run/counted.new", "w") as file:
        file.write(f"{number} {os.getpid()}")
    os.rename("/run/counted.new", "/run/counted")
    time.sleep(0.2)
"""
# An agent that works until it is told to stop.
STEP = 'echo "$n $$" > worked.new; mv worked.new worked'
AGENT = f"cd; until [ -e stop ]; do n=$((n+1)); {STEP}; sleep 0.2; done; n=-1; {STEP}"
WORKED = "/home/agent/worked"
LOOK = "cat /proc/sys/kernel/random/boot_id; head -c 16 /dev/urandom | od -An -tx1; sha256sum /etc/ssh/ssh_host_*_key"

# Reads the flag, and sends it over the link in the clear: what the solution does is encrypted.
PASS_ON = "cat submission.txt; cat submission.txt > /dev/tcp/aux/22"


class Machines:
    """The machines of one environment, each with a login as root."""

    def __init__(self, session: Session, name: str, logins: contextlib.ExitStack) -> None:
        self.environment: Environment = session.environments.find(name)
        self._open: dict[Role, Connection] = {
            role: logins.enter_context(connect(session, self.environment, role)) for role in self.environment.machines
        }

    def text(self, role: Role, *argv: str) -> str:
        done = self._open[role].run(argv)
        assert done.exit_code == 0, done.stderr
        return done.stdout.decode().strip()

    def start(self, role: Role, program: str) -> None:
        self.text(role, "systemd-run", "--quiet", "python3", "-c", program)

    def counted(self, path: str = "/run/counted") -> tuple[int, str]:
        """How far the connection between the machines has come, or something else that counts, and its process."""
        number, process = self.text("primary", "cat", path).split()
        return int(number), process

    def clock_error(self, role: Role) -> float:
        """Seconds by which the clock is certainly wrong: how far it lies outside the time that asking took."""
        errors = []
        for _ in range(3):
            before = time.time()
            said = int(self.text(role, "date", "+%s%N")) / 1e9
            errors.append(max(before - said, said - time.time(), 0.0))
        return min(errors)


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def reaches(machines: Machines, port: int) -> bool:
    attempt = f"import socket; socket.create_connection(('aux', {port}), 5)"
    with contextlib.suppress(AssertionError):
        machines.text("primary", "python3", "-c", attempt)
        return True
    return False


def test_copies_of_a_frozen_environment_are_independent(
    open_session: Callable[[Mapping[str, str]], Session], test_home: Home
) -> None:
    session, store = open_session({}), SnapshotStore(test_home)
    if store.path(SNAPSHOT).exists():  # a test before was killed
        store.remove(SNAPSHOT)
    names = [answer(test_home, "up", str(EXAMPLES / "container_escape"), "escape")["environment"]]
    try:
        with contextlib.ExitStack() as logins:
            agent = logins.enter_context(started(test_home, "agent", names[0], str(AGENTS / "null"), AGENT))
            logins.callback(agent.terminate)
            original = Machines(session, names[0], logins)
            original.start("aux", SERVER)
            wait_for(lambda: ":1388 " in original.text("aux", "cat", "/proc/net/tcp"))
            original.start("primary", CLIENT)
            wait_for(lambda: reached(original, 5))
            wait_for(lambda: reached(original, 5, WORKED))

            frozen = answer(test_home, "freeze", names[0], SNAPSHOT)
            assert (frozen["of"], frozen["machines"].keys()) == (names[0], {"primary", "aux"})
            assert provisioner(test_home, "freeze", names[0], SNAPSHOT).returncode == 2
            at_freeze, worked_at_freeze = original.counted(), original.counted(WORKED)
            for _ in range(2):
                names.append(answer(test_home, "up", "--from", SNAPSHOT)["environment"])
            copies = [Machines(session, name, logins) for name in names[1:]]
            all_three = [original, *copies]

            for machines in all_three:  # each continues, with the same process and the same connection
                number, process = machines.counted()
                assert process == at_freeze[1]
                wait_for(partial(reached, machines, number + 5))
                number, process = machines.counted(WORKED)
                assert process == worked_at_freeze[1]
                wait_for(partial(reached, machines, number + 5, WORKED))
            assert copies[1].counted()[0] < original.counted()[0]
            for role in original.environment.machines:
                looks = [machines.text(role, "sh", "-c", LOOK).splitlines() for machines in all_three]
                assert all(len(set(values)) == 3 for values in zip(*looks, strict=True)), looks
                errors = [machines.clock_error(role) for machines in all_three]
                assert max(errors) < CLOCK_SECONDS, errors
            for machines in copies:
                copied = machines.environment
                assert {each.origin for each in copied.endpoints.values()} == {"snapshot"}
                assert copied.expires_at > copied.created_at > original.environment.created_at
                assert copied.probes
                assert all(probe.reached == probe.expected for probe in copied.probes)
                for role in copied.machines:
                    login = session.environments.login(copied, role, "root")
                    old = replace(login, private_key=store.key_path(SNAPSHOT, "controller"))
                    with pytest.raises(MachineLostError, match="SSH fails"):
                        Connection(old)

            # The agent is at work in each, and ends in each by itself; the command follows the original's.
            for machines in reversed(all_three):
                assert agent.poll() is None
                machines.text("primary", "touch", "/home/agent/stop")
                wait_for(partial(ended, machines))
            assert agent.wait(60) == 0

            # All have the same addresses, and only their own aux VM behind them.
            copies[0].start("aux", "import socket; s = socket.create_server(('', 6000))\nwhile 1: s.accept()")
            wait_for(lambda: reaches(copies[0], 6000))
            assert [reaches(machines, 6000) for machines in all_three] == [False, True, False]

        assert provisioner(test_home, "snapshot", "remove", SNAPSHOT).returncode == 2  # copies of it run
        for name in names[1:]:
            answer(test_home, "agent", name, str(AGENTS / "solver"), "bash -x solve.sh")
            scored = answer(test_home, "score", name)
            assert (scored["status"], scored["score"]) == ("scored", 1.0)
        # That the copies are solved does not count for the original.
        assert answer(test_home, "score", names[0])["score"] == 0.0
        flags = passed_on(test_home, names[1:])
    finally:
        answer(test_home, "destroy", *names)
        provisioner(test_home, "snapshot", "remove", SNAPSHOT)
    assert not store.path(SNAPSHOT).exists()
    assert_recorded(test_home, flags)
    assert_one_byte_is_noticed(test_home, names[1], flags[names[1]])


def passed_on(home: Home, names: list[str]) -> dict[str, str]:
    """Sends each environment's flag over its link, and returns the flags."""
    done = {name: answer(home, "exec", name, "--", "bash", "-c", PASS_ON) for name in names}
    return {name: each["stdout"].strip() for name, each in done.items()}


def assert_recorded(home: Home, flags: Mapping[str, str]) -> None:
    """All have the command that read the flag, the agent that showed it at work, the packets that carried the flag."""
    for name, flag in flags.items():
        assert_one_recorded(home, name, flag)


def assert_one_recorded(home: Home, name: str, flag: str) -> None:
    logs = EnvironmentStore(home).archived_logs(name)
    calls = answer(home, "replay", name, "--part", "calls")["parts"][0]["rows"]
    [read] = [call for call in calls if call.get("argv") == ["bash", "-c", PASS_ON]]
    assert (read["machine"], read["user"], read["exit_code"]) == ("primary", "agent", 0)
    assert {call["part"] for call in calls} >= {"agent", "score"}
    *_, solved = [part for part in answer(home, "replay", name)["parts"] if part["part"].startswith("agent-")]
    shown = "".join(text for _, kind, text in solved["events"] if kind == "o")
    assert "cat /mnt/host/root/flag.txt" in shown
    assert "bytes from the other machine's disk" in shown
    assert flag.startswith("flag{")
    for role in ("primary", "aux"):
        capture = packets.whole((logs / f"{role}-link.pcap").read_bytes())
        # TCP may send it again on a busy host.
        sent_at = min(seconds for seconds, frame in packets.packets(capture) if flag.encode() in frame)
        assert abs(sent_at - datetime.fromisoformat(read["at"]).timestamp()) < SENT_SECONDS
    record = answer(home, "show", name)
    [checked] = answer(home, "verify", name)["checked"]
    assert (checked["head"], checked["problems"]) == (record["recording"], [])


def assert_one_byte_is_noticed(home: Home, name: str, flag: str) -> None:
    capture = EnvironmentStore(home).archived_logs(name) / "primary-link.pcap"
    whole = capture.read_bytes()
    capture.write_bytes(whole.replace(flag.encode(), flag.replace("flag", "flaw").encode(), 1))
    done = provisioner(home, "verify", name)
    assert (done.returncode, done.stdout) == (1, f"{name}: primary-link.pcap: its contents have changed\n")
    capture.write_bytes(whole)
    assert provisioner(home, "verify", name).returncode == 0


def reached(machines: Machines, number: int, path: str = "/run/counted") -> bool:
    with contextlib.suppress(AssertionError):
        return machines.counted(path)[0] >= number
    return False


def ended(machines: Machines) -> bool:
    """Whether the agent has noticed that it is to stop."""
    return machines.counted(WORKED)[0] < 0
