"""Listens on the controller's loopback, which no machine may reach, and notices the machines that did.

Any user of the host may connect to it. Only the words of this proof count; everything else is forgotten.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Self

from provisioner.base.models import Role
from provisioner.isolation.questions import CanaryPorts

# A machine's probe sends its word at once.
VISIT_SECONDS = 2.0
# A further visitor replaces the oldest, so that no user can keep others out.
VISITORS_AT_ONCE = 64
MOST_BYTES = 64
# Between two looks, so that a stream of visitors costs the controller little.
PAUSE_SECONDS = 0.002
# When it ends: other users of the host may keep connecting, and must not delay it.
LAST_LOOKS = 64
# At each look, so that a flood of datagrams, of which the kernel keeps a mebibyte or so meanwhile, hides no word.
DATAGRAMS_AT_ONCE = 4096
DATAGRAMS_KEPT_BYTES = 1 << 20


class Canary:
    """Listens until it is closed. Use as a context manager.

    Args:
        words: each machine's secret word.

    Attributes:
        ports: where it listens, on 127.0.0.1.
    """

    def __init__(self, words: Mapping[Role, str]) -> None:
        self._roles = {word.encode(): role for role, word in words.items()}
        self._seen: set[Role] = set()
        self._visits: dict[socket.socket, tuple[float, bytes]] = {}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._datagrams.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, DATAGRAMS_KEPT_BYTES)
        self._datagrams.bind(("127.0.0.1", 0))
        self._end, self._ended = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for source in (self._listener, self._datagrams, self._ended):
            source.setblocking(False)
            self._selector.register(source, selectors.EVENT_READ)
        self.ports = CanaryPorts(self._listener.getsockname()[1], self._datagrams.getsockname()[1])
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.close()
        self._thread.join()

    def visitors(self) -> list[Role]:
        """Returns the machines whose word has arrived; all of them, once it is closed."""
        return sorted(self._seen)

    def _listen(self) -> None:
        with self._selector, self._listener, self._datagrams, self._ended:
            while True:
                ready = [key.fileobj for key, _ in self._selector.select(VISIT_SECONDS)]
                if self._ended in ready:
                    self._look_a_last_time()
                    break
                self._look_at(ready)
                for visitor in [visitor for visitor, (end, _) in self._visits.items() if end < time.monotonic()]:
                    self._dismiss(visitor)
                time.sleep(PAUSE_SECONDS)
            for visitor in list(self._visits):
                self._dismiss(visitor)

    def _look_a_last_time(self) -> None:
        """Hears what has arrived by now: on a busy host, the last proof may be a word that waits to be read."""
        for _ in range(LAST_LOOKS):
            ready = [key.fileobj for key, _ in self._selector.select(0) if key.fileobj is not self._ended]
            if not ready:
                return
            self._look_at(ready)

    def _look_at(self, sources: Sequence[object]) -> None:
        for source in sources:
            with contextlib.suppress(OSError):  # a visitor that is gone, or no free descriptor
                self._look(source)

    def _look(self, source: object) -> None:
        if source is self._listener:
            for _ in range(VISITORS_AT_ONCE):
                visitor = self._listener.accept()[0]  # until it raises that there is none
                if len(self._visits) >= VISITORS_AT_ONCE:
                    oldest = next(iter(self._visits))
                    self._hear(oldest)  # what has arrived by now counts
                    self._dismiss(oldest)
                visitor.setblocking(False)
                self._visits[visitor] = (time.monotonic() + VISIT_SECONDS, b"")
                self._selector.register(visitor, selectors.EVENT_READ)
                self._hear(visitor)
        elif source is self._datagrams:
            for _ in range(DATAGRAMS_AT_ONCE):
                self._recognise(self._datagrams.recv(MOST_BYTES))
        elif isinstance(source, socket.socket):
            self._hear(source)

    def _hear(self, visitor: socket.socket) -> None:
        if visitor not in self._visits:  # dismissed in the same round
            return
        end, heard = self._visits[visitor]
        try:
            data = visitor.recv(MOST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        heard += data
        self._recognise(heard)
        if data and len(heard) < MOST_BYTES:
            self._visits[visitor] = (end, heard)
        else:
            self._dismiss(visitor)

    def _recognise(self, heard: bytes) -> None:
        if role := self._roles.get(heard):
            self._seen.add(role)

    def _dismiss(self, visitor: socket.socket) -> None:
        if self._visits.pop(visitor, None):
            self._selector.unregister(visitor)
            visitor.close()
