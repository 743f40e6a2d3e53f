"""Bounds what a hostile SSH server can cost: paramiko's transport with limits on packets, banner, window and messages.

paramiko trusts a server that it has authenticated, but root in a machine holds the machine's host key. A server that
breaks a limit loses the connection. Knows nothing of commands, and must never raise a limit.
"""

from __future__ import annotations

import struct
import time
from typing import Any, ClassVar, NoReturn

import paramiko
from paramiko.common import MSG_CHANNEL_DATA, MSG_CHANNEL_EXTENDED_DATA, MSG_CHANNEL_OPEN, MSG_KEXINIT
from paramiko.packet import Packetizer

from provisioner.ssh.keys import CIPHERS, KEY_EXCHANGES, MACS

# RFC 4253, section 6.1: a packet has at most 35,000 bytes. Its MAC may be read with it.
MAXIMUM_PACKET_BYTES = 35_000
MAXIMUM_MAC_BYTES = 64
# RFC 4253, section 4.2: a line has at most 255 characters. paramiko reads at most 100 lines before the version.
MAXIMUM_BANNER_BYTES = 100 * 255
# Messages that bring no output: keepalives, window adjustments, a few for each command. OpenSSH asks for more input
# after 96 KiB at the latest, so that an honest server stays far below.
MESSAGES_AT_ONCE = 10_000
MESSAGES_PER_SECOND = 100
SENT_BYTES_PER_MESSAGE = 16 << 10
# paramiko exchanges keys after each 512 MiB, OpenSSH after gigabytes.
KEY_EXCHANGES_AT_ONCE = 16
KEY_EXCHANGES_PER_SECOND = 0.1
MAXIMUM_LOGGED_CHARACTERS = 200
STDERR = 1  # RFC 4254, section 5.2: the only type of extended data

# OpenSSH's PROTOCOL, section 2.4: a channel to a Unix socket, for which sshd starts no process.
UNIX_SOCKET_CHANNEL = "direct-streamlocal@openssh.com"
# What such a channel may hold: 200 of them at once stay below what a hostile server may cost.
UNIX_SOCKET_WINDOW_BYTES = 128 << 10


_OPEN_UNIX_SOCKET = (
    bytes([MSG_CHANNEL_OPEN]) + struct.pack(">I", len(UNIX_SOCKET_CHANNEL)) + UNIX_SOCKET_CHANNEL.encode()
)


class ProtocolViolation(paramiko.SSHException):
    """The server sent what no honest server sends."""


class _Allowance:
    """Limits how many events may come: a fixed number, and more with each second since the beginning.

    Args:
        at_once: how many may come at the beginning.
        per_second: how many more may come for each second. What is not used adds up.
    """

    def __init__(self, at_once: float, per_second: float) -> None:
        self._begin = time.monotonic()
        self._left = at_once
        self._per_second = per_second

    def change(self, by: float) -> None:
        """Adds to the allowance, or takes from it."""
        self._left += by

    def is_exceeded(self) -> bool:
        """Returns whether more has come than was allowed."""
        return self._left + (time.monotonic() - self._begin) * self._per_second < 0


class BoundedPacketizer(Packetizer):
    """Reads and writes packets, and refuses long ones, long banners, and floods of messages that bring no output.

    Attributes:
        violation: the limit that the server broke; None as long as it behaves.
    """

    def __init__(self, socket: Any) -> None:
        super().__init__(socket)
        self.violation: ProtocolViolation | None = None
        self._banner_bytes = 0
        self._messages = _Allowance(MESSAGES_AT_ONCE, MESSAGES_PER_SECOND)
        self._key_exchanges = _Allowance(KEY_EXCHANGES_AT_ONCE, KEY_EXCHANGES_PER_SECOND)

    def refuse(self, what: str) -> NoReturn:
        """Ends the connection.

        Args:
            what: what the server did, in our own words.
        """
        self.violation = ProtocolViolation(what)
        raise self.violation

    def output_arrived(self) -> None:
        """Gives back the cost of a message, as it brought output that was asked for."""
        self._messages.change(1)

    def read_all(self, n: int, check_rekey: bool = False) -> bytes:
        """Reads a part of a packet. paramiko would allocate whatever its length field says."""
        if n > MAXIMUM_PACKET_BYTES + MAXIMUM_MAC_BYTES:
            self.refuse(f"it announced a packet of {n} bytes")
        return bytes(super().read_all(n, check_rekey))

    def write_all(self, out: Any) -> None:
        """Writes a packet. The more we send, the more a server may answer."""
        super().write_all(out)
        self._messages.change(len(out) / SENT_BYTES_PER_MESSAGE)

    def read_message(self) -> tuple[int, paramiko.Message]:
        """Reads a message and counts it."""
        kind, message = super().read_message()
        self._messages.change(-1)
        if self._messages.is_exceeded():
            self.refuse("it flooded the connection with messages")
        if kind == MSG_KEXINIT:
            self._key_exchanges.change(-1)
            if self._key_exchanges.is_exceeded():
                self.refuse("it demanded new keys again and again")
        return kind, message

    def _read_timeout(self, timeout: float) -> bytes:
        """Reads a piece of the lines before the first packet. paramiko would read a line of any length."""
        data = bytes(super()._read_timeout(timeout))  # type: ignore[misc]
        self._banner_bytes += len(data)
        if self._banner_bytes > MAXIMUM_BANNER_BYTES:
            self.refuse("it sent too much before its version")
        return data


def _bounded(channel: paramiko.Channel, data: bytes) -> bytes:
    """Returns output that a channel received, if it fits the window that we granted."""
    packetizer = _packetizer(channel)
    unread_bytes = len(channel.in_buffer) + len(channel.in_stderr_buffer)
    if unread_bytes + len(data) > channel.in_window_size:
        packetizer.refuse("it sent more output than it was allowed to")
    if data:
        packetizer.output_arrived()
    return data


def _feed(channel: paramiko.Channel, message: paramiko.Message) -> None:
    channel.in_buffer.feed(_bounded(channel, message.get_binary()))


def _feed_extended(channel: paramiko.Channel, message: paramiko.Message) -> None:
    if message.get_int() != STDERR:
        _packetizer(channel).refuse("it sent output of an unknown type")
    channel.in_stderr_buffer.feed(_bounded(channel, message.get_binary()))


def _packetizer(channel: paramiko.Channel) -> BoundedPacketizer:
    assert isinstance(channel.transport, BoundedTransport)
    return channel.transport.packetizer


class BoundedTransport(paramiko.Transport):
    """Connects to an SSH server that is not trusted, with modern algorithms and without compression.

    Args:
        stream: the socket, or a channel of another connection.
        host_key_type: the only type of host key to accept.

    Raises:
        ValueError: host keys of that type are not supported.
    """

    packetizer: BoundedPacketizer
    _channel_handler_table: ClassVar = {
        **paramiko.Transport._channel_handler_table,  # type: ignore[attr-defined]
        MSG_CHANNEL_DATA: _feed,
        MSG_CHANNEL_EXTENDED_DATA: _feed_extended,
    }

    def __init__(self, stream: Any, host_key_type: str) -> None:
        super().__init__(stream, packetizer_class=BoundedPacketizer)
        options = self.get_security_options()
        options.kex = tuple(name for name in KEY_EXCHANGES if name in options.kex)
        options.ciphers, options.digests, options.compression = CIPHERS, MACS, ("none",)
        options.key_types = (host_key_type,)
        self._unix_socket = ""

    def open_unix_socket(self, path: str, timeout_seconds: float) -> paramiko.Channel:
        """Opens a channel to a Unix socket of the machine. All calls on one transport must give the same path.

        Raises:
            paramiko.SSHException: nothing listens there, sshd refuses, or the connection broke.
        """
        self._unix_socket = path
        return self.open_channel(UNIX_SOCKET_CHANNEL, window_size=UNIX_SOCKET_WINDOW_BYTES, timeout=timeout_seconds)

    def _send_user_message(self, data: paramiko.Message) -> None:
        """Sends a message. To one that opens a channel to a Unix socket, adds what paramiko does not know of."""
        if data.asbytes().startswith(_OPEN_UNIX_SOCKET):
            data.add_string(self._unix_socket)
            data.add_string("")  # reserved, as is the number
            data.add_int(0)
        super()._send_user_message(data)  # type: ignore[misc]

    @property
    def violation(self) -> ProtocolViolation | None:
        """The limit that the server broke; None as long as it behaves."""
        return self.packetizer.violation

    def _parse_ext_info(self, msg: paramiko.Message) -> None:
        """Ignores the server's extensions: paramiko would read as many as the server claims, even four billion."""

    def _parse_debug(self, msg: paramiko.Message) -> None:
        """Ignores debugging messages, whose escaping costs paramiko milliseconds each."""

    def _log(self, level: int, msg: str | list[str], *args: object) -> None:
        """Logs at most a line per message, without control characters: some messages quote the server."""
        if self.logger.isEnabledFor(level):
            text = " ".join(msg) if isinstance(msg, list) else msg
            self.logger.log(level, "%s", ascii(text[:MAXIMUM_LOGGED_CHARACTERS]))
