"""An SSH server on the loopback in the tests' own process, with real keys.

The test's own function runs each command.
"""

from __future__ import annotations

import contextlib
import io
import shlex
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from typing import IO

import paramiko
from paramiko.common import (
    AUTH_FAILED,
    AUTH_SUCCESSFUL,
    OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED,
    OPEN_FAILED_CONNECT_FAILED,
    OPEN_SUCCEEDED,
    cMSG_CHANNEL_REQUEST,
)

from provisioner.remote.keys import KeyPair, ed25519_key_pair


class Call:
    """A client's request to run a command.

    Attributes:
        user: the user that the client logged in as.
        command: the text for the login shell.
        argv: the same, split into words.
        channel: the channel to the client.
    """

    def __init__(self, user: str, command: str, channel: paramiko.Channel) -> None:
        self.user, self.command, self.channel = user, command, channel
        self.argv = shlex.split(command)

    def stdin(self) -> bytes:
        """Reads the client's input to its end."""
        data = b""
        while chunk := self.channel.recv(1 << 16):
            data += chunk
        return data


Program = Callable[[Call], int]
"""Runs a command and returns its exit code, or -N if signal N ended it."""


def in_a_shell(call: Call, environment: dict[str, str] | None = None) -> int:
    """Runs the command in bash, as sshd does for root, and waits for its end but not for background processes."""
    process = subprocess.Popen(
        ["/bin/bash", "-c", call.command],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment,
    )  # fmt: skip
    assert process.stdin is not None
    pumps = [
        threading.Thread(target=_feed, args=(call.channel, process.stdin), daemon=True),
        threading.Thread(target=_tell, args=(process.stdout, call.channel.sendall), daemon=True),
        threading.Thread(target=_tell, args=(process.stderr, call.channel.sendall_stderr), daemon=True),
    ]
    for pump in pumps:
        pump.start()
    code = process.wait()
    for pump in pumps[1:]:
        pump.join(0.2)  # background processes may hold them open for longer
    return code


def _feed(channel: paramiko.Channel, stdin: IO[bytes]) -> None:
    with contextlib.suppress(OSError, EOFError):
        while data := channel.recv(1 << 15):
            stdin.write(data)
            stdin.flush()
    with contextlib.suppress(OSError):
        stdin.close()


def _tell(stream: IO[bytes] | None, send: Callable[[bytes], None]) -> None:
    assert stream is not None
    with stream, contextlib.suppress(OSError, EOFError):
        while data := stream.read1(1 << 15):  # type: ignore[attr-defined]
            send(data)


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
        self.program, self.authorize = program, authorize
        self.is_up = is_up
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._transports: list[paramiko.Transport] = []
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
        """Counts the connected clients, after waiting for those that are disconnecting."""
        for transport in self._transports:
            transport.join(0.5)
        return sum(transport.is_active() for transport in self._transports)

    def cut(self) -> None:
        """Cuts all connections, as the end of a machine does."""
        while self._transports:
            self._transports.pop().close()

    def close(self) -> None:
        """Ends the server and raises the first error from its commands."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join(5)
        self._listener.close()
        self.cut()
        for error in self.errors:
            raise error

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                stream, _ = self._listener.accept()
                if not self.is_up():
                    stream.close()
                    continue
                threading.Thread(target=self._serve, args=(stream,), daemon=True).start()

    def _serve(self, stream: socket.socket) -> None:
        transport = paramiko.Transport(stream)
        self._transports.append(transport)
        transport.add_server_key(paramiko.Ed25519Key.from_private_key(io.StringIO(self.shown_key_pair.private)))
        try:
            transport.start_server(server=_Server(self))
        except (paramiko.SSHException, EOFError, OSError):
            transport.close()


class _Server(paramiko.ServerInterface):
    """Serves one connection."""

    def __init__(self, sshd: Sshd) -> None:
        self._sshd = sshd
        self._user = ""

    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        self._user = username
        allowed = self._sshd.authorize(username, f"{key.get_name()} {key.get_base64()}")
        return AUTH_SUCCESSFUL if allowed else AUTH_FAILED

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return OPEN_SUCCEEDED if kind == "session" else OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        call = Call(self._user, command.decode(), channel)
        threading.Thread(target=self._run, args=(call,), daemon=True).start()
        return True

    def _run(self, call: Call) -> None:
        try:
            _send_end(call.channel, self._sshd.program(call))
        except (OSError, EOFError):
            pass  # the client has gone
        except BaseException as error:
            self._sshd.errors.append(error)
        finally:
            with contextlib.suppress(OSError, EOFError):  # the client may have gone
                call.channel.close()

    def check_channel_direct_tcpip_request(
        self, chanid: int, origin: tuple[str, int], destination: tuple[str, int]
    ) -> int:
        try:
            onward = socket.create_connection(destination, timeout=5)
        except OSError:
            return OPEN_FAILED_CONNECT_FAILED
        onward.settimeout(None)
        threading.Thread(target=self._forward, args=(chanid, onward), daemon=True).start()
        return OPEN_SUCCEEDED

    def _forward(self, chanid: int, onward: socket.socket) -> None:
        channel = None
        for transport in self._sshd._transports:
            while channel is None and transport.is_active() and transport.server_object is self:
                channel = transport.accept(5)
        if channel is None:
            onward.close()
            return
        assert channel.chanid == chanid

        def back() -> None:
            with contextlib.suppress(OSError, EOFError):
                while data := onward.recv(1 << 15):
                    channel.sendall(data)
            channel.close()

        threading.Thread(target=back, daemon=True).start()
        with contextlib.suppress(OSError, EOFError):
            while data := channel.recv(1 << 15):
                onward.sendall(data)
        onward.close()


def _send_end(channel: paramiko.Channel, code: int) -> None:
    """Sends the exit status or, if a signal ended the command, the signal's name (RFC 4254, 6.10)."""
    if code >= 0:
        channel.send_exit_status(code)
        return
    message = paramiko.Message()
    message.add_byte(cMSG_CHANNEL_REQUEST)
    message.add_int(channel.remote_chanid)
    message.add_string("exit-signal")
    message.add_boolean(False)
    message.add_string(signal.Signals(-code).name.removeprefix("SIG"))
    message.add_boolean(False)
    message.add_string("")
    message.add_string("")
    assert channel.transport is not None
    channel.transport._send_user_message(message)  # type: ignore[attr-defined]
