"""Connects to machines by SSH with a pinned host key, and makes calls over the connection.

The machine is not trusted: whatever it does, connecting ends in time and in little memory.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

import paramiko

from provisioner.errors import MachineLostError, ProvisionerError
from provisioner.models import Endpoint
from provisioner.recording.calls import CallLog
from provisioner.signals import no_check
from provisioner.ssh.answering_socket import ATTEMPT_SECONDS, answering_socket, no_ssh
from provisioner.ssh.bounded_transport import BoundedTransport
from provisioner.ssh.calls import Calls, Channel, refused
from provisioner.ssh.exec_channel import close_call, open_call
from provisioner.ssh.login import Login
from provisioner.validation import shown

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
            with self._cut_off_after(3 * HANDSHAKE_SECONDS):
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
                with self._cut_off_after(2 * HANDSHAKE_SECONDS):
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
        return self._transport.is_active()

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
        return open_call(self._transport, HANDSHAKE_SECONDS, check_in_time)

    def _close_call(self, channel: Channel) -> None:
        assert isinstance(channel, paramiko.Channel)
        close_call(channel)

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
