"""Waits for a machine's sshd to answer: opens connections, one after the other, until one of them brings something."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable

from provisioner.errors import MachineLostError
from provisioner.ssh.login import Login
from provisioner.ssh.namespaces import Sockets

# While a machine boots, a forwarded port accepts connections before the guest's sshd does, and a packet lost then is
# repeated only seconds later. So new attempts start beside those that wait, ever more rarely: a busy machine's sshd may
# take its time, and each attempt adds to its work. One that is refused has reached the guest. A machine that is up gets
# the longest pause at once.
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
