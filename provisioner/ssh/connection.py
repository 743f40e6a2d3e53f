"""Connects to machines by SSH with a pinned host key, and makes calls over the connection.

A call gets a channel to the machine's exec server, or a server of its own in a machine that has none yet. A machine
whose server is gone for good counts as lost: it gets no other. The machine is not trusted: whatever it does, connecting
ends in time and in little memory.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import paramiko

from provisioner.base.clock import overdue
from provisioner.base.errors import MachineLostError, ProvisionerError
from provisioner.base.models import Endpoint
from provisioner.base.signals import no_check
from provisioner.base.validation import shown
from provisioner.recording.calls import CallLog
from provisioner.ssh.bounded_transport import BoundedTransport
from provisioner.ssh.calls import SOCKET, Calls, NoServerError, refused
from provisioner.ssh.exchange import Channel
from provisioner.ssh.keys import Login
from provisioner.ssh.namespaces import Sockets, is_held

GUEST = Path(__file__).parent.parent / "guest"
# The service's file: a machine that has it runs the server, or did.
SERVICE = "/etc/systemd/system/provisioner-exec.service"
# How long a server may take to start, once: systemd starts one again that ended.
START_SECONDS = 30.0
PAUSE_SECONDS = 0.5
# What a server imports: packages, and after them the modules that import only those before them.
MODULES = (
    "provisioner_guest/__init__.py",
    "provisioner_guest/login.py",
    "provisioner_guest/cgroup.py",
    "provisioner_guest/exec/__init__.py",
    "provisioner_guest/exec/start.py",
    "provisioner_guest/exec/container.py",
    "provisioner_guest/exec/call.py",
)
# Reads the server's modules, whose length in bytes comes first, and serves what follows on stdin.
LOADER = """
import json, os, sys, types
def read(size):
    data = b""
    while len(data) < size:
        piece = os.read(0, size - len(data))
        if not piece:
            sys.exit(1)
        data += piece
    return data
for path, text in json.loads(read(int(read(8)))):
    name = path.replace("/__init__.py", "").replace(".py", "").replace("/", ".")
    module = types.ModuleType(name)
    module.__file__ = "/nowhere/" + path
    module.__path__ = []
    sys.modules[name] = module
    exec(compile(text, path, "exec"), module.__dict__)
module.Call(0, 1).serve()
os._exit(0)
"""


# While a machine boots, it takes no packets, and one that is lost is repeated only seconds later. So new attempts start
# beside those that wait, ever more rarely: a busy machine's sshd may take its time, and each attempt adds to its work.
# One that is refused has reached the guest. A machine that is up gets the longest pause at once.
ATTEMPT_SECONDS = 0.7
LONGEST_PAUSE_SECONDS = 8.0
REFUSED_SECONDS = 0.15
ATTEMPTS_AT_ONCE = 6
CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 60.0
# What sshd says to clients that are too many ("Exceeded MaxStartups").
TOO_MANY = b"Exce"


def answering_socket(
    login: Login, deadline: float, alive: Callable[[], bool], where: str, boots: bool
) -> socket.socket:
    """Opens staggered connections and returns the first on which sshd sends something."""
    attempts: list[tuple[socket.socket, float]] = []
    first_pause = ATTEMPT_SECONDS if boots else LONGEST_PAUSE_SECONDS
    begin_at, pause = 0.0, first_pause
    sockets = Sockets(login.pidfile)
    try:
        while time.monotonic() < deadline and alive():
            now = time.monotonic()
            if now > begin_at and len(attempts) < ATTEMPTS_AT_ONCE:
                patience = max(0.05, min(CONNECT_SECONDS, deadline - now))
                begin_at = now + ATTEMPT_SECONDS
                with contextlib.suppress(OSError):
                    stream = sockets.connect(login.endpoint.host, login.endpoint.port, patience)
                    stream.setblocking(False)  # with a timeout, Python waits before it reads
                    attempts.append((stream, now))
                    begin_at = now + pause
                    pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            for attempt in list(attempts):
                answer = _first_bytes(attempt[0])
                if answer and answer != TOO_MANY:
                    attempts.remove(attempt)
                    attempt[0].settimeout(None)
                    return attempt[0]
                if answer is not None or now - attempt[1] > ANSWER_SECONDS:
                    attempt[0].close()
                    attempts.remove(attempt)
                if answer == b"":
                    begin_at, pause = min(begin_at, now + REFUSED_SECONDS), first_pause
                elif answer == TOO_MANY:
                    begin_at = min(begin_at, now + ATTEMPT_SECONDS)
            time.sleep(0.05)
    finally:
        sockets.close()
        for stream, _ in attempts:
            stream.close()
    raise no_ssh(where, alive)


def no_ssh(where: str, alive: Callable[[], bool]) -> MachineLostError:
    """Returns the error for a machine whose sshd did not answer."""
    why = "it did not answer in time" if alive() else "it ended by itself"
    return MachineLostError(f"No SSH at {where}: {why}.")


def _first_bytes(stream: socket.socket) -> bytes | None:
    """Peeks at the first bytes from sshd: None if there are none yet, empty if the connection was closed."""
    try:
        return stream.recv(4, socket.MSG_PEEK)
    except BlockingIOError:
        return None
    except OSError:
        return b""


# For each answer of sshd itself: the handshake, the login, the start of a command.
HANDSHAKE_SECONDS = 60


class Connection(Calls):
    """Keeps an open connection to one machine as one user. Use as a context manager.

    Args:
        login: the user, the machine and the keys.
        wait_seconds: how long to wait for the machine's sshd to answer.
        alive: called between attempts; False means that waiting is useless.
        check: called whenever the connection waits; an exception that it raises ends the wait.
        calls: records what the machine is told to do; None records nothing.
        boots: the machine may still be booting or has just resumed: an attempt without an answer is soon followed by
            another.

    Raises:
        MachineLostError: sshd did not answer in time, showed another host key, or refused the login.
    """

    _broken_by = (paramiko.SSHException, EOFError, ConnectionError)

    def __init__(
        self,
        login: Login,
        wait_seconds: float = 30,
        alive: Callable[[], bool] = lambda: True,
        check: Callable[[], None] = no_check,
        calls: CallLog | None = None,
        boots: bool = False,
    ) -> None:
        super().__init__(f"{login.endpoint.host}:{login.endpoint.port}", calls, check)
        self.login = login

        def worth_waiting() -> bool:
            check()
            return alive()

        where = f"{login.user}@{login.endpoint.host}:{login.endpoint.port}"
        deadline = time.monotonic() + wait_seconds
        self._via = Connection(login.via, wait_seconds, alive, check, boots=boots) if login.via else None
        stream: socket.socket | paramiko.Channel | None = None
        try:
            stream = (
                self._via._channel_to(login.endpoint, deadline, worth_waiting, where)
                if self._via
                else answering_socket(login, deadline, worth_waiting, where, boots)
            )
            self._transport = _transport(stream, login, where)
            with overdue(3 * HANDSHAKE_SECONDS, self.close):
                self._handshake(where)
        except BaseException:
            if self._via:
                self._via.close()
            if stream:
                stream.close()  # its transport's thread ends with it
            raise

    def _channel_to(
        self, endpoint: Endpoint, deadline: float, alive: Callable[[], bool], where: str
    ) -> paramiko.Channel:
        """Waits for another machine's sshd, at its address as seen from this machine, and opens a channel to it."""
        while time.monotonic() < deadline and alive():
            try:
                with overdue(2 * HANDSHAKE_SECONDS, self.close):
                    return self._transport.open_channel(
                        "direct-tcpip", (endpoint.host, endpoint.port), ("127.0.0.1", 0), timeout=HANDSHAKE_SECONDS
                    )
            except Exception:  # it does not listen yet
                if not self._transport.is_active():
                    raise self._lost() from None
            time.sleep(ATTEMPT_SECONDS)
        raise no_ssh(where, alive)

    def _handshake(self, where: str) -> None:
        try:
            self._transport.start_client(timeout=HANDSHAKE_SECONDS)
            host_key = self._transport.get_remote_server_key()
            if f"{host_key.get_name()} {host_key.get_base64()}" != self.login.host_key:
                raise MachineLostError(f"{where} shows a host key that is not the machine's: refusing to continue.")
            key = paramiko.Ed25519Key.from_private_key_file(str(self.login.private_key))
            self._transport.auth_publickey(self.login.user, key)
        except ProvisionerError:
            raise
        except Exception as error:  # paramiko raises whatever the machine's bytes made it stumble over
            if violation := self._transport.violation:
                raise refused(where, "sshd", violation) from error
            raise MachineLostError(f"{where} answers, but SSH fails: {shown(str(error))}") from error
        self._transport.set_keepalive(15)

    @property
    def active(self) -> bool:
        """Whether the connection has not broken, as far as is known here."""
        pidfile = self.login.pidfile
        return self._transport.is_active() and (pidfile is None or is_held(pidfile))

    def close(self) -> None:
        """Ends the connection, and whatever waits for it. Safe to repeat, and never waits for the machine."""
        # The outermost socket goes first: a machine in between may take no more messages.
        if self._via:
            self._via.close()
        self._transport.close()

    @property
    def _answer_seconds(self) -> float:
        return HANDSHAKE_SECONDS

    def _open_call(self, check_in_time: Callable[[], None]) -> tuple[paramiko.Channel, bytes]:
        deadline = time.monotonic() + START_SECONDS
        while True:
            check_in_time()
            begin = time.monotonic()
            try:
                return self._transport.open_unix_socket(SOCKET, HANDSHAKE_SECONDS), b""
            except paramiko.SSHException:
                if not self.active or time.monotonic() - begin > HANDSHAKE_SECONDS:
                    raise
            if not self._has_server():
                return self._own_server()
            if time.monotonic() > deadline:
                raise NoServerError("its exec server has ended.")
            time.sleep(PAUSE_SECONDS)

    def _has_server(self) -> bool:
        with contextlib.closing(self._transport.open_session(timeout=HANDSHAKE_SECONDS)) as channel:
            channel.exec_command(f"test -e {SERVICE}")
            if not channel.status_event.wait(HANDSHAKE_SECONDS):
                raise paramiko.SSHException("sshd does not say how a command ended")
            return channel.exit_status == 0

    def _own_server(self) -> tuple[paramiko.Channel, bytes]:
        """Starts a server for one call, whose program is sent along."""
        channel = self._transport.open_session(timeout=HANDSHAKE_SECONDS)
        channel.exec_command(f"exec python3 -I -S -c '{LOADER}'")
        modules = json.dumps([(path, (GUEST / path).read_text()) for path in MODULES]).encode()
        return channel, b"%8d" % len(modules) + modules

    def _close_call(self, channel: Channel) -> None:
        """Closes a call's channel. Output may arrive at the same moment.

        paramiko closes the pipe behind `fileno` while its own thread may be writing to it, which breaks the connection
        of all calls, or writes into whatever file has the number next (paramiko's issue 2271). So nothing writes to it
        first.
        """
        assert isinstance(channel, paramiko.Channel)
        for buffer in (channel.in_buffer, channel.in_stderr_buffer):
            buffer.set_event(threading.Event())
        channel.close()

    def _lost(self) -> ProvisionerError:
        if violation := self._transport.violation:
            return refused(self._where, "sshd", violation)
        return super()._lost()


def _transport(stream: socket.socket | paramiko.Channel, login: Login, where: str) -> BoundedTransport:
    """Returns a transport that is not connected yet."""
    key_type = login.host_key.split()[0]
    try:
        transport = BoundedTransport(stream, key_type)
    except ValueError as error:
        raise MachineLostError(
            f"{where} answers, but SSH fails: host keys of type {key_type} are not supported."
        ) from error
    transport.banner_timeout = transport.handshake_timeout = transport.auth_timeout = HANDSHAKE_SECONDS
    return transport
