"""Captures what a machine's cards carry, in files of libpcap's format, each with a bound. Standard library only.

QEMU writes them: it opens each before it gives up its privileges, and nothing in the machine reaches them. It bounds
the length of a packet but not of a file, so the watchdog ends the capture whose file is full.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path

from provisioner.clouds.local.vm import disk, qemu
from provisioner.recording.packets import LIMIT_BYTES

# Written by the controller, in the machine's directory: what its cards carry is to be captured.
WANTED = "capture"
# The cards that other machines and the internet are reached through. The management card carries the controller's SSH.
CARDS = ("link", "internet")
# A file that has grown by so much since the watchdog's last look is looked at again sooner.
FAST_BYTES = 2 << 20
FAST_LOOK_SECONDS = 0.05
# What the monitor says below a card of which a capture is made.
_FILTER = re.compile(r"  - capture-(\w+): type=filter-dump,file=run/(\w+)\.pcap,[a-z]+=\w+(?:,[a-z]+=\w+)*")


def path(directory: Path, card: str) -> Path:
    """Returns the file of a card's capture."""
    return directory / qemu.RUN / f"{card}.pcap"


def is_own(line: str) -> bool:
    """Whether a line of the monitor's `info network` speaks of a capture of ours, or only heads such lines."""
    match = _FILTER.fullmatch(line)
    return line == "filters:" or bool(match and match[1] == match[2] and match[1] in CARDS)


class Captures:
    """Keeps the captures of one machine within their bound, for the watchdog.

    Args:
        directory: the machine's.
        answer_seconds: how long QEMU may take for an answer.
    """

    def __init__(self, directory: Path, answer_seconds: float) -> None:
        self._directory = directory
        self._answer_seconds = answer_seconds
        self._sizes = dict.fromkeys(CARDS, 0)
        self._ended: set[str] = set()

    def look(self) -> bool:
        """Ends each capture that is full, cuts its file off, and returns whether one grows fast.

        If the host's disk is nearly full, all end.
        """
        before, self._sizes = self._sizes, {card: self._taken(card) for card in CARDS}
        for card, size in self._sizes.items():
            is_open = size > 0 and card not in self._ended
            if size > LIMIT_BYTES or (is_open and disk.nearly_full(self._directory)):
                self._end(card)
        return any(size - before[card] > FAST_BYTES and card not in self._ended for card, size in self._sizes.items())

    def _taken(self, card: str) -> int:
        """What a capture takes of the host's disk: one that was cut off while QEMU still wrote has a hole."""
        with contextlib.suppress(OSError):
            status = path(self._directory, card).stat(follow_symlinks=False)
            return min(status.st_size, status.st_blocks * 512) if stat.S_ISREG(status.st_mode) else 0
        return 0

    def _end(self, card: str) -> None:
        if card not in self._ended:
            # A QEMU that is busy with another client is asked again; meanwhile the file is cut off all the same.
            with contextlib.suppress(OSError, ValueError, qemu.QMPError):
                with qemu.QMP(self._directory, self._answer_seconds) as control:
                    control.execute("object-del", id=qemu.capture_name(card))
                self._ended.add(card)
        with contextlib.suppress(OSError):
            descriptor = os.open(path(self._directory, card), os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if os.fstat(descriptor).st_size > LIMIT_BYTES:
                    os.ftruncate(descriptor, LIMIT_BYTES)
            finally:
                os.close(descriptor)


def existing(directory: Path) -> Iterable[tuple[str, Path]]:
    """Yields the cards of a machine of which there is a capture, each with its file."""
    for card in CARDS:
        if path(directory, card).is_file() and not path(directory, card).is_symlink():
            yield card, path(directory, card)
