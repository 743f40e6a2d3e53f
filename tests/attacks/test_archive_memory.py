"""A machine answers `cp` with what takes little to send and much to keep: the controller's memory and disk are bounded.

Each attack runs in a process of its own, whose memory is limited, and whose peak is measured.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from itertools import chain, repeat
from pathlib import Path

import pytest

from provisioner.base.errors import TaskError
from provisioner.copying import transfer, trees
from provisioner.copying.copy_program import DIRECTORY, FILE, PIECE, PIECE_BYTES, SKIPPED, UP
from provisioner.copying.trees import TreeError, TreeReader
from provisioner.ssh.exec_frames import HEADER, frame
from tests.unit.fakes.copies import HostileMachine, directory, file
from tests.waiting import BOUND_SECONDS

# Far below what a million of anything takes, and what any attack may take, 300 MiB.
GROWTH_MIB = 16
LIMIT_BYTES = 1 << 30


class Nowhere:
    """Takes a tree and keeps nothing."""

    def begin_directory(self, name: str) -> None:
        pass

    def end_directory(self) -> None:
        pass

    def begin_file(self, name: str, *, executable: bool) -> None:
        pass

    def write(self, data: bytes) -> None:
        pass

    def end_file(self) -> None:
        pass


def read(answer: Iterable[bytes]) -> None:
    reader = TreeReader(Nowhere())
    for piece in answer:
        reader.feed(piece)


def million(entry: bytes) -> Iterable[bytes]:
    return chain([frame(DIRECTORY)], repeat(entry * 100, 10_000))


def empty_files() -> None:
    """A million files, all empty."""
    read(million(file(b"a", b"")))


def empty_directories() -> None:
    """A million directories beside each other."""
    trees.MAX_ENTRIES = 100_000
    read(million(directory(b"a")))


def skipped_entries() -> None:
    """A million long names that are not to be copied."""
    trees.MAX_ENTRIES = 100_000
    read(million(frame(SKIPPED, b"\x1b" * 255)))


def nested_directories() -> None:
    """A million directories inside each other."""
    read(million(frame(DIRECTORY, b"d")))


def long_paths() -> None:
    """Directories with the longest names, inside each other, again and again."""
    trees.MAX_ENTRIES = 100_000
    read(million(frame(DIRECTORY, b"x" * 255) * 8 + frame(UP) * 8))


def unfinished_frame() -> None:
    """A frame that says it is long, in pieces of a byte, and never ends."""
    reader = TreeReader(Nowhere())
    reader.feed(frame(FILE) + HEADER.pack(PIECE, PIECE_BYTES))
    for _ in range(PIECE_BYTES - 1):
        reader.feed(b"x")
    reader.finish()


def endless_contents() -> None:
    """A file without an end."""
    trees.LIMIT_BYTES = 256 << 20
    read(chain([frame(FILE)], repeat(frame(PIECE, b"x" * PIECE_BYTES))))


def entries_on_the_disk() -> None:
    """Files that are really written, as many as may be, and removed because one more comes."""
    trees.MAX_ENTRIES = 2_000
    with tempfile.TemporaryDirectory() as directory:

        def answer() -> Iterator[bytes]:
            yield frame(DIRECTORY)
            for number in range(3_000):
                yield file(f"{number:0>200}".encode(), b"")

        try:
            transfer.download(HostileMachine(answer()).connection, "a", Path(directory))
        finally:
            assert list(Path(directory).iterdir()) == []


ATTACKS = [
    empty_files, empty_directories, skipped_entries, nested_directories, long_paths, unfinished_frame, endless_contents,
    entries_on_the_disk,
]  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_the_controllers_memory_is_bounded(attack: object) -> None:
    name = attack.__name__  # type: ignore[attr-defined]
    done = subprocess.run(
        [sys.executable, "-m", "tests.attacks.test_archive_memory", name],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=BOUND_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    before_mib, peak_mib = map(int, done.stdout.split())
    print(f"{name}: {peak_mib} MiB at most, {before_mib} MiB before it")
    assert peak_mib - before_mib < GROWTH_MIB


def peak_mib() -> int:
    # Not getrusage's: it includes the process that started this one.
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) >> 10


def measure(name: str) -> None:
    """Runs an attack in this process, which must be refused, and prints the process's peaks before and after in MiB."""
    before_mib = peak_mib()
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES, LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, LIMIT_BYTES))
    try:
        globals()[name]()
    except (TreeError, TaskError):
        print(before_mib, peak_mib())
    else:
        raise AssertionError(f"{name} was not refused")


if __name__ == "__main__":
    measure(sys.argv[1])
