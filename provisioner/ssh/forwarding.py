"""Brings a port of a machine to this host's loopback: each connection there becomes a channel to the machine.

The machine is not trusted. It opens no connection: only programs on this host do. How many connections there are, and
what each may send before it is read, is bounded.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Callable
from typing import NoReturn, Protocol

from provisioner.signals import wait

LOOPBACK = "127.0.0.1"
# Others wait until one of these is over.
MOST_CONNECTIONS = 64
PIECE_BYTES = 1 << 15
# How often to look whether it is to end.
LOOK_SECONDS = 0.2
END_SECONDS = 5.0
# How often to ask the kernel of a silent client whether it is still there. One that closed its connection looks like
# one that has said all and waits for the answer, until its kernel has forgotten it.
KEEPALIVE_SECONDS = 30


class Channel(Protocol):
    """Describes a channel to a port of the machine. paramiko's Channel fits."""

    def recv(self, limit_bytes: int, /) -> bytes:
        """Waits for a piece; empty at the end."""

    def sendall(self, data: bytes, /) -> None:
        """Sends a piece, as soon as the machine takes it."""

    def shutdown_write(self) -> None:
        """Says that nothing more will be sent."""

    def close(self) -> None:
        """Closes it, and wakes the threads that wait for it."""


def listen(port: int | None, preferred: int = 0) -> socket.socket:
    """Listens on this host's loopback.

    Args:
        port: the port; None for `preferred` if that can be had, and otherwise for any.

    Raises:
        OSError: the port cannot be had.
    """
    if port is None:
        with contextlib.suppress(OSError):
            return socket.create_server((LOOPBACK, preferred))
    return socket.create_server((LOOPBACK, port or 0))


class Forwarder:
    """Carries connections to a listener on to a machine. Use as a context manager, which ends them.

    Args:
        listener: closed at the end.
        open_channel: opens a channel for a connection. It raises an OSError if the machine's port is closed, and
            another exception if the machine is lost.
        tell: says what became of a connection that could not be carried on.
    """

    def __init__(
        self, listener: socket.socket, open_channel: Callable[[], Channel], tell: Callable[[str], None]
    ) -> None:
        self._listener = listener
        self._open_channel = open_channel
        self._tell = tell
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._lost: Exception | None = None
        self._accepting = threading.Thread(target=self._accept, name="forward", daemon=True)

    def __enter__(self) -> Forwarder:
        self._accepting.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._accepting.join(END_SECONDS)
        self._listener.close()
        with self._lock:
            for stream in self._open:
                _end(stream)

    def wait(self, check: Callable[[], None]) -> NoReturn:
        """Waits until an exception ends it: the check's, or the one by which the machine was lost."""
        while True:
            wait(LOOK_SECONDS, check)
            if self._lost:
                raise self._lost

    def _accept(self) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        while not self._ended.is_set():
            if not self._free.acquire(timeout=LOOK_SECONDS):
                continue
            stream = None
            with contextlib.suppress(OSError):
                if poll.poll(1000 * LOOK_SECONDS):
                    stream, _ = self._listener.accept()
                    _keep_asking(stream)
            if stream is None:
                self._free.release()
                continue
            with self._lock:
                self._open.add(stream)
            threading.Thread(target=self._serve, args=(stream,), daemon=True).start()

    def _serve(self, stream: socket.socket) -> None:
        try:
            self._carry(stream, self._open_channel())
        except OSError as error:
            self._tell(error.strerror or "A connection broke.")
        except Exception as error:
            self._lost = error
        finally:
            with self._lock:
                self._open.discard(stream)
            stream.close()
            self._free.release()

    def _carry(self, stream: socket.socket, channel: Channel) -> None:
        """Moves bytes both ways until both sides have said all, or one of them is gone."""
        back = threading.Thread(target=_to_client, args=(channel, stream), daemon=True)
        poll = select.poll()
        poll.register(stream, 0)  # for errors alone
        try:
            back.start()
            _to_machine(stream, channel)
            while back.is_alive() and not poll.poll(1000 * LOOK_SECONDS):
                pass
        finally:
            channel.close()  # which ends the other direction, too, if it has not ended
        back.join()


def _keep_asking(stream: socket.socket) -> None:
    """Has the kernel find out that a client has gone, which then is an error of the stream."""
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_SECONDS)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_SECONDS)


def _to_machine(stream: socket.socket, channel: Channel) -> None:
    """Moves what the client sends, then says that this was all."""
    try:
        while data := stream.recv(PIECE_BYTES):
            channel.sendall(data)
        channel.shutdown_write()
    except ConnectionError:  # the client has gone
        channel.close()
    except Exception:  # noqa: S110 - the machine takes no more; what it has sent is still on its way to the client
        pass


def _to_client(channel: Channel, stream: socket.socket) -> None:
    """Moves what the machine sends, then says that this was all."""
    try:
        while data := channel.recv(PIECE_BYTES):
            stream.sendall(data)
        stream.shutdown(socket.SHUT_WR)
    except Exception:  # the client has gone, or the connection to the machine broke
        _end(stream)


def _end(stream: socket.socket) -> None:
    """Ends a connection, and wakes the threads that wait for it."""
    with contextlib.suppress(OSError):
        stream.shutdown(socket.SHUT_RDWR)
