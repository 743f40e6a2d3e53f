"""An SSH server on the loopback in the tests' own process, with real keys, and with an exec server behind it.

The test's own function carries each call out; by default the real exec server does.
"""

from __future__ import annotations

import contextlib
import functools
import io
import socket
import threading
from collections.abc import Callable

import paramiko
from paramiko.common import (
    AUTH_FAILED,
    AUTH_SUCCESSFUL,
    OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED,
    OPEN_FAILED_CONNECT_FAILED,
    OPEN_SUCCEEDED,
)

from provisioner.ssh.bounded_transport import UNIX_SOCKET_CHANNEL
from provisioner.ssh.keys import KeyPair, ed25519_key_pair
from tests.unit.fakes.exec_call import Call, in_a_shell, in_bash
from tests.waiting import BOUND_SECONDS

Program = Callable[[Call], int | None]
"""Carries a call out and returns its exit code; None if it has said how it ended."""


class Sshd:
    """Listens on a port of its own. Use as a context manager.

    Args:
        program: runs the commands.
        authorize: returns whether a user may log in with a key, `TYPE BASE64`.
        is_up: returns whether sshd answers; until then connections are closed at once, as by a forwarded port.
    """

    def __init__(
        self,
        program: Program = in_a_shell,
        authorize: Callable[[str, str], bool] = lambda _user, _key: True,
        is_up: Callable[[], bool] = lambda: True,
    ) -> None:
        self.key_pair: KeyPair = ed25519_key_pair()
        self.shown_key_pair = self.key_pair
        self.errors: list[BaseException] = []
        # Set at the end: what a test's program may wait for, so that no thread is left behind.
        self.over = threading.Event()
        self.program, self.authorize = program, authorize
        self.is_up = is_up
        # Whether an exec server listens. If not, root's login shell takes commands, which are kept.
        self.has_server = True
        self.commands: list[str] = []
        # How many clients have logged in.
        self.logins = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._transports: list[paramiko.Transport] = []
        self._calls: list[threading.Thread] = []
        self._beginning = threading.Lock()
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def __enter__(self) -> Sshd:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def host_key(self) -> str:
        """Returns the host key, `TYPE BASE64`. Clients see `shown_key_pair`, the same unless a test changes it."""
        return self.key_pair.public

    def connections(self) -> int:
        """Counts the connected clients. One that is disconnecting counts until this side has noticed."""
        return sum(transport.is_active() for transport in self._transports)

    def cut(self) -> None:
        """Cuts all connections, as the end of a machine does."""
        while self._transports:
            self._transports.pop().close()

    def close(self) -> None:
        """Ends the server and raises the first error from its commands."""
        self.over.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join(BOUND_SECONDS)
        self._listener.close()
        self.cut()
        with self._beginning:
            begun = list(self._calls)
        for call in begun:
            call.join(BOUND_SECONDS)
        for error in self.errors:
            raise error

    def begin(self, work: Callable[[], None]) -> None:
        """Carries out a call, or a command of a session, in a thread that `close` waits for."""
        thread = threading.Thread(target=work, daemon=True)
        with self._beginning:  # `close` joins it: it must have started
            thread.start()
            self._calls.append(thread)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                stream, _ = self._listener.accept()
                stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as OpenSSH does
                if not self.is_up():
                    stream.close()
                    continue
                threading.Thread(target=self._serve, args=(stream,), daemon=True).start()

    def _serve(self, stream: socket.socket) -> None:
        transport = paramiko.Transport(stream)
        self._transports.append(transport)
        transport.add_server_key(paramiko.Ed25519Key.from_private_key(io.StringIO(self.shown_key_pair.private)))
        server = _Server(self)
        try:
            transport.start_server(server=server)
            self.logins += 1
            server.serve(transport)
        except (paramiko.SSHException, EOFError, OSError):
            transport.close()


class _Server(paramiko.ServerInterface):
    """Serves one connection."""

    def __init__(self, sshd: Sshd) -> None:
        self._sshd = sshd
        self._handlers: dict[int, Callable[[paramiko.Channel], None]] = {}
        # Connections to ports whose channels have not been served yet.
        self._waiting: dict[int, socket.socket] = {}

    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        allowed = self._sshd.authorize(username, f"{key.get_name()} {key.get_base64()}")
        return AUTH_SUCCESSFUL if allowed else AUTH_FAILED

    def check_channel_request(self, kind: str, chanid: int) -> int:
        if kind == "session" and not self._sshd.has_server:
            return OPEN_SUCCEEDED
        if kind != UNIX_SOCKET_CHANNEL:
            return OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED
        if not self._sshd.has_server:
            return OPEN_FAILED_CONNECT_FAILED
        self._handlers[chanid] = self._run
        return OPEN_SUCCEEDED

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        self._sshd.commands.append(command.decode())
        transport = channel.get_transport()
        confirmed, send = threading.Event(), transport._send_user_message  # type: ignore[attr-defined]

        def send_and_tell(data: paramiko.Message) -> None:
            send(data)
            if threading.current_thread() is transport:
                transport._send_user_message = send  # type: ignore[attr-defined]
                confirmed.set()

        def run() -> None:
            confirmed.wait(BOUND_SECONDS)
            in_bash(channel, command.decode())

        # paramiko confirms the request once this has returned; a command that is quicker would close the channel first.
        transport._send_user_message = send_and_tell  # type: ignore[attr-defined]
        self._sshd.begin(run)
        return True

    def serve(self, transport: paramiko.Transport) -> None:
        """Serves the channels that the client opens, until it goes."""
        while transport.is_active():
            channel = transport.accept(1)
            if channel and (handler := self._handlers.pop(channel.chanid, None)):
                self._waiting.pop(channel.chanid, None)
                self._sshd.begin(functools.partial(handler, channel))
        for onward in self._waiting.values():  # whose client left before
            onward.close()

    def _run(self, channel: paramiko.Channel) -> None:
        try:
            call = Call(channel)
            call.end(self._sshd.program(call))
        except (OSError, EOFError):
            pass  # the client has gone
        except BaseException as error:
            self._sshd.errors.append(error)
        finally:
            with contextlib.suppress(OSError, EOFError):  # the client may have gone
                channel.close()

    def check_channel_direct_tcpip_request(
        self, chanid: int, origin: tuple[str, int], destination: tuple[str, int]
    ) -> int:
        try:
            onward = socket.create_connection(destination, timeout=BOUND_SECONDS)
        except OSError:
            return OPEN_FAILED_CONNECT_FAILED
        onward.settimeout(None)
        self._handlers[chanid] = functools.partial(self._forward, onward)
        self._waiting[chanid] = onward
        return OPEN_SUCCEEDED

    @staticmethod
    def _forward(onward: socket.socket, channel: paramiko.Channel) -> None:
        """Moves bytes both ways. Each direction ends for itself, as in OpenSSH's; the channel closes after both."""

        def back() -> None:
            with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
                while data := onward.recv(1 << 15):
                    channel.sendall(data)
                channel.shutdown_write()

        returning = threading.Thread(target=back, daemon=True)
        with onward, contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            returning.start()
            with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
                while data := channel.recv(1 << 15):
                    onward.sendall(data)
                onward.shutdown(socket.SHUT_WR)
            while returning.is_alive() and not channel.closed:
                returning.join(0.05)
            with contextlib.suppress(OSError):  # a channel that was closed ends the other direction, too
                onward.shutdown(socket.SHUT_RDWR)
            returning.join()
            channel.close()
