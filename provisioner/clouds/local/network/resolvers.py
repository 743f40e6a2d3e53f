"""Chooses which of the host's DNS resolvers answers a machine: the first, until it falls silent. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

# glibc asks again after 5 seconds (resolv.conf(5), "timeout"); by then another resolver should be asked.
SILENCE_SECONDS = 4.0
# resolv.conf(5): further name servers are ignored.
MAX_RESOLVERS = 3


def parse_resolv_conf(text: str) -> tuple[str, ...]:
    """Reads the addresses of the name servers; 127.0.0.1, resolv.conf's default, if there are none."""
    addresses = []
    for line in text.splitlines():
        words = line.split()
        if words[:1] == ["nameserver"] and len(words) > 1 and _is_address(words[1]):
            addresses.append(words[1])
    return tuple(addresses[:MAX_RESOLVERS]) or ("127.0.0.1",)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


class Resolvers:
    """Remembers which resolver is asked, and since when it has owed an answer."""

    def __init__(self) -> None:
        """Starts with resolv.conf's default."""
        self._addresses: tuple[str, ...] = ("127.0.0.1",)
        self._chosen = 0
        self._silent_since: float | None = None

    def replace(self, addresses: Sequence[str]) -> None:
        """Takes the host's present resolvers."""
        if tuple(addresses) != self._addresses:
            self._addresses, self._chosen, self._silent_since = tuple(addresses), 0, None

    def choose(self, at: float) -> str:
        """Returns the address to ask.

        Args:
            at: the time, in monotonic seconds.
        """
        if self._silent_since is None:
            self._silent_since = at
        elif at - self._silent_since > SILENCE_SECONDS:
            self._chosen, self._silent_since = self._chosen + 1, at
        return self._addresses[self._chosen % len(self._addresses)]

    def answered(self) -> None:
        """Notes that the chosen resolver has answered."""
        self._silent_since = None
