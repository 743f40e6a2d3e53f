"""A moto account whose instances answer SSH on the loopback, for tests that need many. No machine runs.

Usage: python -m tests.aws.loopback HOST_KEY   prints the API's URL and serves until stdin ends

It answers as the guest helper would, for a family of one task, `main`, whose start() does nothing and whose score is 1.
An agent's command `sleep N` waits; `exit N` ends with that exit code. Lines on stdin cause events that AWS knows:

    interrupt ENVIRONMENT       the environment's spot instances end
    no-quota REGION             the account may start no more instances in the region
    quota REGION                the account may start instances there again
    rates .                     prints a line: what EC2 has obeyed and throttled since the last one, as JSON
"""

from __future__ import annotations

import base64
import json
import logging
import os
import re
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import paramiko
from moto.core.responses import ActionResult
from moto.core.types import Base64EncodedString
from moto.core.utils import utcnow
from moto.ec2.models import ec2_backends, elastic_network_interfaces
from moto.ec2.models.instances import StateReason
from moto.ec2.responses.general import General

from tests.aws.ec2.server import AMIS_VARIABLE, describe_amis
from tests.aws.proxy import Fault, serving
from tests.unit.fakes.exec_call import Call
from tests.unit.fakes.probes import honest_answers, request_in

ROOT = Path(__file__).parents[2]
PORT = 22
# How an image's builder is switched off. A machine's time to live names `poweroff`, too, and only sets a clock.
POWER_OFF = "systemctl --no-block poweroff"
SETUP = {
    "standard_version": "0.5.0",
    "tasks": {"main": {"permissions": [], "instructions": "Do it.", "required_environment_variables": []}},
    "has_score": True,
}
# The family for provisioner. None of its code runs.
FAMILY = """
class TaskFamily:
    standard_version = "0.5.0"

    @staticmethod
    def get_tasks():
        return {"main": {}}

    @staticmethod
    def get_instructions(t):
        return "Do it."

    @staticmethod
    def score(t, submission):
        return 1.0
"""


class Machines:
    """Plays all machines: one thread accepts connections, and one serves each of them."""

    def __init__(self, key: Path) -> None:
        self._selector = selectors.DefaultSelector()
        self._key = paramiko.Ed25519Key.from_private_key_file(str(key))
        self._addresses = self._free_addresses()
        self._mutex = threading.Lock()
        self._transports: dict[str, list[paramiko.Transport]] = {}
        self._ended: set[str] = set()
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        threading.Thread(target=self._accept, daemon=True).start()

    def console(self) -> str:
        """Returns the output of cloud-init at the first boot."""
        key = f"{self._key.get_name()} {self._key.get_base64()} root@machine"
        return f"-----BEGIN SSH HOST KEY KEYS-----\n{key}\n-----END SSH HOST KEY KEYS-----\n"

    def new_address(self) -> str:
        """Returns a new public address, whose SSH port answers from now on."""
        with self._mutex:
            address, listener = next(self._addresses)
        self._selector.register(listener, selectors.EVENT_READ)
        self._wake.send(b"x")
        return address

    def end(self, address: str) -> None:
        """Cuts a machine's connections, and accepts no more."""
        self._ended.add(address)
        for transport in self._transports.pop(address, []):
            transport.close()

    @staticmethod
    def _free_addresses() -> Iterator[tuple[str, socket.socket]]:
        for number in range(1 << 22):
            address = f"127.{64 + (number >> 16)}.{number >> 8 & 255}.{number & 255}"
            listener = socket.socket()
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((address, PORT))
            except PermissionError:
                raise
            except OSError:
                listener.close()
                continue
            listener.listen()
            yield address, listener

    def _accept(self) -> None:
        while True:
            for ready, _ in self._selector.select():
                if ready.fileobj is self._woken:
                    self._woken.recv(4096)
                    continue
                listener = ready.fileobj
                assert isinstance(listener, socket.socket)
                stream, _ = listener.accept()
                if stream.getsockname()[0] in self._ended:
                    stream.close()
                    continue
                threading.Thread(target=self._serve, args=(stream,), daemon=True).start()

    def _serve(self, stream: socket.socket) -> None:
        address = stream.getsockname()[0]
        transport = paramiko.Transport(stream)
        transport.add_server_key(self._key)
        self._transports.setdefault(address, []).append(transport)
        if address in self._ended:  # since this connection was accepted, when `end` did not know it yet
            transport.close()
            return
        try:
            login = _Login(self, address)
            transport.start_server(server=login)
            while transport.is_active():
                if (channel := transport.accept(5)) is not None:
                    channel.settimeout(600)
                    threading.Thread(target=login.run, args=(channel,), daemon=True).start()
        except (paramiko.SSHException, EOFError, OSError):
            transport.close()


class _Login(paramiko.ServerInterface):
    """Accepts every login and answers every command."""

    # Shared by all machines: results, whose names are random, and when the agents of each began.
    _results: dict[str, str] = {}  # noqa: RUF012
    _agents: dict[tuple[str, str], float] = {}  # noqa: RUF012

    def __init__(self, machines: Machines, address: str) -> None:
        self._machines = machines
        self._address = address

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        return paramiko.common.AUTH_SUCCESSFUL

    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return paramiko.common.OPEN_SUCCEEDED

    def run(self, channel: paramiko.Channel) -> None:
        """Answers one call of the exec server."""
        # A client that has gone is no error, even if that shows only when the channel is closed.
        with suppress(OSError, EOFError, paramiko.SSHException), closing(channel):
            call = Call(channel)
            if call.argv[0] == "agent.py":
                self._follow_agent(call, json.loads(call.stdin()))
            else:
                call.say(self._answer(call))
            call.end(0)
            if POWER_OFF in call.command:
                _power_off(self._address)
                self._machines.end(self._address)

    def _follow_agent(self, call: Call, request: dict[str, Any]) -> None:
        """Answers as guest/agent.py does: with signs of life while the agent works, its output, and its end."""
        agent = (self._address, request["id"])
        if request["start"]:
            self._agents.setdefault(agent, time.monotonic())
        if agent not in self._agents:
            call.say(b"n 0 0\n")
            return
        seconds, code, said = _plays(request["command"])
        limit = request["limit_seconds"]
        timed_out = limit is not None and seconds > limit
        end = self._agents[agent] + (limit if timed_out else seconds)
        while (left := end - time.monotonic()) > 0:
            call.say(b"b 0 0\n")
            time.sleep(min(left, 5.0))
        begin = request["offsets"]["o"]
        ended = json.dumps({"exit_code": None if timed_out else code, "timed_out": timed_out}).encode()
        call.say(b"o %d %d\n%s" % (begin, len(said[begin:]), said[begin:]))
        call.say(b"x 0 %d\n%s" % (len(ended), ended))

    def _answer(self, call: Call) -> bytes:
        stdin = call.stdin()
        if call.request["operation"] == "read":
            return self._results.pop(call.request["path"]).encode()
        if call.argv[0] == "probe.py":
            return honest_answers(request_in(call.program))
        if call.argv[0] == "helper.py":
            request = json.loads(stdin)
            self._results[request["result"]] = json.dumps({"status": "ok", "value": _value(request["operation"])})
        return b"nothing to tell\n" if call.argv[0] == "journalctl" else b""


def _plays(command: str) -> tuple[float, int, bytes]:
    """Returns how many seconds an agent's command takes, its exit code, and its output."""
    if match := re.fullmatch(r"sleep ([0-9.]+)", command):
        return float(match[1]), 0, b"slept\n"
    if match := re.fullmatch(r"exit (\d+)", command):
        return 0.0, int(match[1]), b"no\n"
    return 0.0, 0, b"done\n"


def _value(operation: str) -> Any:
    return {"setup": SETUP, "score": 1.0, "read_submission": {"found": True, "text": "42"}}.get(operation, {})


def _power_off(address: str) -> None:
    for account in ec2_backends.values():
        for backend in account.values():
            for instance in list(backend.all_instances()):
                if instance.public_ip == address and instance.state == "running":
                    backend.stop_instances([instance.id])


def _interrupt(machines: Machines, environment: str) -> None:
    """Ends an environment's spot instances as EC2 does (EC2 user guide, "Spot Instance interruptions")."""
    for account in ec2_backends.values():
        for backend in account.values():
            for instance in list(backend.all_instances()):
                if instance.lifecycle == "spot" and environment in (tag["value"] for tag in instance.get_tags()):
                    address = str(instance.public_ip)  # which a terminated instance has no more
                    backend.terminate_instances([instance.id])
                    reason = "Server.SpotInstanceTermination"
                    instance.state_reason = StateReason(f"{reason}: Spot instance termination", reason)
                    machines.end(address)


def main() -> None:
    """Serves until stdin ends."""
    logging.getLogger("paramiko").addHandler(logging.NullHandler())  # a client that only tries a port is no error
    machines = Machines(Path(sys.argv[1]))

    def get_console_output(self: General) -> ActionResult:
        instance = self._get_param("InstanceId")
        output = Base64EncodedString(base64.b64encode(machines.console().encode()).decode())
        return ActionResult({"InstanceId": instance, "Timestamp": utcnow(), "Output": output})

    setattr(elastic_network_interfaces, "random_public_ip", machines.new_address)  # noqa: B010
    setattr(General, "get_console_output", get_console_output)  # noqa: B010
    with serving() as api:
        print(api.url, flush=True)
        for line in sys.stdin:
            event, target = line.split()
            if event == "interrupt":
                _interrupt(machines, target)
            elif event == "rates":
                print(api.throttle.report(), flush=True)
            elif event == "quota":
                api.faults = [fault for fault in api.faults if fault.region != target]
            else:
                api.inject(Fault("RunInstances", "VcpuLimitExceeded", region=target))


@dataclass
class AccountOfMany:
    """Refers to a running account.

    Attributes:
        url: the URL of its API.
    """

    url: str
    _stdin: IO[str]
    _stdout: IO[str]

    def happen(self, event: str, target: str) -> None:
        """Causes an event that the module's docstring lists."""
        self._stdin.write(f"{event} {target}\n")
        self._stdin.flush()

    def rates(self) -> str:
        """Returns what EC2 has obeyed and throttled since the last call, as JSON."""
        self.happen("rates", ".")
        return self._stdout.readline()


@contextmanager
def account_of_many(directory: Path, niceness: int = 0) -> Iterator[AccountOfMany]:
    """Runs the account in a process of its own.

    Args:
        directory: the directory for its files.
        niceness: by how much its process gives way to others, from 0 to 19.
    """
    key = directory / "host_key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    argv = ["nice", "-n", str(niceness), sys.executable, "-m", "tests.aws.loopback", str(key)]
    describe_amis(directory / "amis.json")
    environment = {**os.environ, AMIS_VARIABLE: str(directory / "amis.json")}
    with subprocess.Popen(
        argv, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        yield AccountOfMany(server.stdout.readline().strip(), server.stdin, server.stdout)
        server.stdin.close()


if __name__ == "__main__":
    main()
