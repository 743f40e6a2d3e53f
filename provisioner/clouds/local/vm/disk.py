"""Creates and copies machines' disks, and bounds what they take from the host's: before a launch, and while they run.

A machine's disk is a sparse layer over its image or a template, and may grow to its whole size. Few ever do, so each
machine is sure of a share of its disk only, and may take more while the host has it. When the host's disk is nearly
full, the machine that is furthest beyond its share ends, as Kubernetes evicts pods under disk pressure. A machine that
has ended keeps its disk until it is destroyed, as its operator may still want that, but it keeps no other alive.
Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from provisioner.base import child_environment
from provisioner.base.errors import CapacityError
from provisioner.base.printable import last_lines, printable
from provisioner.clouds.local.vm import bubblewrap, qemu
from provisioner.store.files import read_end, write_atomically

# In a machine's directory: the disk that its own is a layer over, and what tells it from a later one of that name.
LOWER = "disk_lower"

# The beginning of a qcow2 file (QEMU's docs/interop/qcow2.txt): magic, version, the size that a machine sees, whether
# the file is encrypted, then fields up to the features that a reader must know. Of those only the first is harmless: it
# was not closed.
_HEADER = struct.Struct(">4sI 16x Q I 36x Q")
_CLOSED_BADLY = 1
QEMU_IMG = "qemu-img"
# Of the same: where the name of the disk below begins, and its length.
_BELOW = struct.Struct(">4s 4x Q I")
_MAGIC = b"QFI\xfb"
# The format allows no longer name.
_NAME_BYTES = 1023
# An image, a layer of its build, and its base are fewer.
_MOST_DISKS = 16
SAID_BYTES = 500
# Copying what lies between a machine's disk and its image, on a busy host.
REBASE_SECONDS = 600.0
# A slow disk, while other machines use it.
COPIED_BYTES_PER_SECOND = 20 << 20


class UntrustworthyLayerError(OSError):
    """A layer is not what QEMU makes of a machine's disk: it leads to other files, or is encrypted or too large."""


class ReplacedBelowError(OSError):
    """The disk that a machine's is a layer over is gone, or another has its name: a template that was thrown away."""


# Why no disk comes of `put_over` and `noted_below`.
UNUSABLE = (UntrustworthyLayerError, ReplacedBelowError, subprocess.SubprocessError)


def create(layer: Path, lower: Path | None, gib: int | None = None) -> None:
    """Creates a layer, or replaces it by an empty one.

    Args:
        lower: the disk below; None for a disk that is no layer, and needs a size.
        gib: the size that the machine sees; None for that of the disk below.

    Raises:
        subprocess.SubprocessError: qemu-img failed.
    """
    layer.unlink(missing_ok=True)
    size = [] if gib is None else [f"{gib}G"]
    _qemu_img(layer, [lower] if lower else [], "create", *(_backing(lower) if lower else ()), layer.name, *size)


def _backing(lower: Path) -> tuple[str, ...]:
    return "-b", str(lower.resolve()), "-F", "raw" if lower.suffix == ".raw" else "qcow2"


def chain(disk: Path) -> list[Path]:
    """Returns a disk and those below it, as their headers say. All are plain files.

    Only for disks whose headers this host has written: a program that is enclosed may read what they name.

    Raises:
        UntrustworthyLayerError: a header names no plain file, or a disk that is above it already.
        OSError: one of them cannot be read.
    """
    found = [disk.resolve()]
    while (below := _below(found[-1])) and len(found) < _MOST_DISKS:
        if below in found:
            raise UntrustworthyLayerError(f"{found[-1].name} is a layer over itself")
        found.append(below)
    return found


def _below(disk: Path) -> Path | None:
    """Returns the disk below, as a header says; None if there is none."""
    if not stat.S_ISREG(disk.stat().st_mode):  # to open a pipe may take for ever
        raise UntrustworthyLayerError(f"{disk.name} is no plain file")
    if disk.suffix == ".raw":
        return None
    with disk.open("rb") as file:
        magic, place, length = _BELOW.unpack(file.read(_BELOW.size).ljust(_BELOW.size, b"\0"))
        if magic != _MAGIC or not 0 < place < os.fstat(file.fileno()).st_size or length > _NAME_BYTES:
            return None
        file.seek(place)
        name = file.read(length)
    try:
        return (disk.parent / os.fsdecode(name)).resolve()
    except (ValueError, RuntimeError) as error:  # a zero byte, or links in a circle
        raise UntrustworthyLayerError(f"{disk.name} names no file as the disk below it") from error


def _qemu_img(layer: Path, lower: Iterable[Path], verb: str, *arguments: str) -> None:
    """Runs qemu-img on a layer, the only file that it may write. What it reads, machines have written."""
    layer.touch(mode=0o600)
    readable = [each for disk in lower for each in chain(disk)]
    with bubblewrap.system_calls() as filtered:
        options = ("--unshare-net", "--die-with-parent", "--seccomp", str(filtered))
        enclosed = bubblewrap.command(QEMU_IMG, readable=readable, writable=[layer], options=options)
        argv = (*enclosed, QEMU_IMG, verb, "-q", "-f", "qcow2", *arguments)
        _run(*argv, directory=layer.parent, pass_fds=[filtered])


def _run(
    *argv: str, directory: Path | None = None, pass_fds: Iterable[int] = (), seconds: float = REBASE_SECONDS
) -> None:
    """Runs a program, away from the operator's terminal: what it says may be a machine's word.

    Raises:
        subprocess.SubprocessError: it failed, and said why, or did not end in time.
    """
    with tempfile.TemporaryFile() as said:
        done = subprocess.run(
            argv, check=False, stdin=subprocess.DEVNULL, stdout=said, stderr=said, timeout=seconds, cwd=directory,
            start_new_session=True, pass_fds=tuple(pass_fds), env=child_environment.for_program(os.environ),
        )  # fmt: skip
        if done.returncode:
            said.seek(max(0, said.seek(0, os.SEEK_END) - SAID_BYTES))
            words = printable(said.read(SAID_BYTES).decode(errors="replace"))
            raise subprocess.SubprocessError(f"a disk could not be written: {last_lines(words, SAID_BYTES)}")


def copy(layer: Path, target: Path) -> None:
    """Copies a layer, whose machine stands still, without its holes and without copying where files can share blocks.

    Raises:
        OSError: there is no such layer.
        subprocess.SubprocessError: it could not be copied, as for want of room, or not in a time that fits its size.
    """
    seconds = REBASE_SECONDS + layer.lstat().st_blocks * 512 / COPIED_BYTES_PER_SECOND
    argv = ("cp", "--no-dereference", "--reflink=auto", "--sparse=auto", "--", str(layer), str(target))
    _run(*argv, seconds=seconds)


def seen_gib(layer: Path) -> int:
    """Returns the size that a machine sees of a layer that none has written yet.

    Raises:
        OSError: there is no such layer.
    """
    with layer.open("rb") as file:
        _, _, size, _, _ = _HEADER.unpack(file.read(_HEADER.size).ljust(_HEADER.size, b"\0"))
    return int(-(-size // GIB))


def put_over(layer: Path, lower: Path, image: Path, gib: int) -> None:
    """Makes a layer that a machine has written a layer over an image alone, with all that was in between.

    Args:
        lower: the disk that the machine's was a layer over, whatever the layer itself says.
        image: the disk below that.
        gib: the size that the machine was given.

    Raises:
        UntrustworthyLayerError: it is not what it must be: an attacker in QEMU may have changed it.
        subprocess.SubprocessError: qemu-img failed, as if the disk between is gone, or did not end in time.
    """
    require_plain(layer, gib)
    _qemu_img(layer, [lower], "rebase", "-u", *_backing(lower), layer.name)
    if lower.resolve() != image.resolve():
        _qemu_img(layer, [lower, image], "rebase", "-t", "unsafe", *_backing(image), layer.name)


def name_base(layer: Path, base: str) -> None:
    """Writes into a layer the path of the raw disk below it. A relative one begins at the layer's directory.

    Raises:
        subprocess.SubprocessError: qemu-img failed.
    """
    _qemu_img(layer, [], "rebase", "-u", "-b", base, "-F", "raw", layer.name)


def note_below(directory: Path, lower: Path) -> None:
    """Notes in a machine's directory which disk the machine's is a layer over.

    Raises:
        OSError: there is no such disk.
    """
    (directory / LOWER).write_text(json.dumps([str(lower.resolve()), identity(lower)]))


def noted_below(directory: Path) -> Path:
    """Returns the disk that a machine's is a layer over.

    Raises:
        ReplacedBelowError: it is there no more, although QEMU still has it open.
        OSError: it was never noted.
    """
    path, noted = json.loads((directory / LOWER).read_text())
    lower = Path(path)
    if not lower.exists() or identity(lower) != noted:
        raise ReplacedBelowError(f"the disk below its own, {lower}, was removed or replaced since the machine started")
    return lower


def identity(path: Path) -> list[int]:
    """Returns what changes if a file becomes another, although it has the same name.

    Raises:
        OSError: it is gone.
    """
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ino]


def require_plain(layer: Path, gib: int) -> None:
    """Requires that nothing but the disk below is looked up for a layer, and that reading it comes to an end.

    Args:
        gib: the size that the machine was given. qemu-img looks at each part of a larger one, for years if need be.

    Raises:
        UntrustworthyLayerError: it names another file for its data, needs what no machine's disk does, or is larger.
    """
    with layer.open("rb") as file:
        begin = file.read(_HEADER.size)
    if len(begin) < _HEADER.size:
        raise UntrustworthyLayerError(f"{layer.name} is no disk")
    magic, version, size, encrypted, needs = _HEADER.unpack(begin)
    if magic != _MAGIC or version != 3 or size > gib << 30 or encrypted or needs & ~_CLOSED_BADLY:
        raise UntrustworthyLayerError(f"{layer.name} is not a disk as QEMU makes it for a machine")


@contextlib.contextmanager
def opened(layer: Path) -> Iterator[tuple[int, int]]:
    """Opens a layer for QEMU, and yields a descriptor to read and write, and one to read only."""
    with layer.open("r+b") as both, layer.open("rb") as reading:
        yield both.fileno(), reading.fileno()


OVERLAY = "disk.qcow2"
# In a machine's directory: the bytes that it is sure of; and why it was ended, if it was.
SHARE = "disk_share"
EVICTED = "evicted"
GIB = 1 << 30
# Left free for the controller, its ledger and its logs. A machine adds about a GiB between two looks of its watchdog.
RESERVE_BYTES = 2 * GIB
REASON_BYTES = 500
# How long a machine that is ended may take to leave. No other is ended meanwhile.
LEAVING_SECONDS = 30.0


@dataclass(frozen=True)
class Overlay:
    """A machine's disk, as a file of the host.

    Args:
        directory: the machine's directory.
        used_bytes: what it takes of the host's disk.
        share_bytes: what the machine is sure of.
    """

    directory: Path
    used_bytes: int
    share_bytes: int

    @property
    def due_bytes(self) -> int:
        """What the machine is sure of and has not taken yet."""
        return max(0, self.share_bytes - self.used_bytes)

    @property
    def excess_bytes(self) -> int:
        """What the machine has taken beyond its share."""
        return max(0, self.used_bytes - self.share_bytes)


@dataclass(frozen=True)
class Room:
    """What the host's disk has for machines that do not exist yet.

    Args:
        free_bytes: what is free.
        due_bytes: what existing machines are guaranteed and have not taken yet.
    """

    free_bytes: int
    due_bytes: int

    @property
    def bytes(self) -> int:
        """What new machines may be sure of."""
        return max(0, self.free_bytes - self.due_bytes - RESERVE_BYTES)


def overlays(environments: Path) -> list[Overlay]:
    """Lists the disks of all machines in a home's environments directory, made or about to be made."""
    listed = []
    for environment in environments.glob("*/"):
        with contextlib.suppress(OSError):  # it is being destroyed
            for path in environment.glob(f"*/{SHARE}"):
                with contextlib.suppress(OSError, ValueError):
                    listed.append(Overlay(path.parent, _used(path.with_name(OVERLAY)), int(path.read_text())))
    return listed


def _used(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0


def room(environments: Path) -> Room:
    """Looks at the file system that a home's environments directory lies in."""
    return Room(_free(_existing(environments)), sum(overlay.due_bytes for overlay in overlays(environments)))


def _free(directory: Path) -> int:
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def share_bytes(disk_gib: int, overcommit: float) -> int:
    """Returns what a machine with a disk of this size is sure of."""
    return int(disk_gib * GIB / overcommit)


def most_bytes(environments: Path) -> int:
    """Returns what new machines could be sure of if the file system of a home's environments directory were empty."""
    status = os.statvfs(_existing(environments))
    kept_for_root = status.f_bfree - status.f_bavail
    return (status.f_blocks - kept_for_root) * status.f_frsize - RESERVE_BYTES


def _existing(environments: Path) -> Path:
    return next(path for path in (environments, *environments.parents) if path.is_dir())


def claim(environments: Path, disks_gib: Mapping[Path, int], overcommit: float) -> None:
    """Claims the shares of an environment's machines. To be called under a lock, as others claim theirs, too.

    Args:
        environments: the home's environments directory.
        disks_gib: the disk of each machine, by the machine's directory.
        overcommit: how many times more all disks may have than the host.

    Raises:
        CapacityError: they do not fit beside what existing machines are guaranteed. Nothing is claimed.
    """
    shares = {directory: share_bytes(disk_gib, overcommit) for directory, disk_gib in disks_gib.items()}
    needed, available = sum(shares.values()), room(environments)
    if needed > available.bytes:
        raise CapacityError(
            f"The disk of this host has no room for these machines: they need {needed / GIB:.1f} GiB, and "
            f"{max(0, available.bytes) / GIB:.1f} GiB are available. Of {available.free_bytes / GIB:.1f} GiB free, "
            f"{available.due_bytes / GIB:.1f} GiB are guaranteed to other machines and {RESERVE_BYTES / GIB:.1f} GiB "
            "are kept for provisioner itself.",
            hint="Wait until other environments have ended, free some space (`provisioner image prune`), or raise "
            f"disk_overcommit in the configuration file, which is {overcommit:g}.",
        )
    for directory, share in shares.items():
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(directory / SHARE, str(share))


def is_first_to_go(own: Path, existing: Collection[Overlay], free_bytes: int) -> bool:
    """Decides whether a machine has to end so that the host's disk does not get full. Pure.

    Args:
        own: the machine's directory.
        existing: the disks of all machines that run or are just being ended.
        free_bytes: what is free on the host.
    """
    if free_bytes >= RESERVE_BYTES:
        return False
    excess = {overlay.directory: overlay.excess_bytes for overlay in existing}
    return excess.get(own, 0) > 0 and excess[own] == max(excess.values())


def must_go(directory: Path) -> bool:
    """Decides the same for the machine in a directory as things are now."""
    if _free(directory) >= RESERVE_BYTES:  # as nearly always: nothing else need be looked at
        return False
    existing = [each for each in overlays(directory.parent.parent) if _counts(each.directory)]
    # What is free is looked at last: a disk that is removed before that counts for neither.
    return is_first_to_go(directory, existing, _free(directory))


def nearly_full(directory: Path) -> bool:
    """Returns whether the file system that a directory lies in has less left than the controller needs.

    False if the directory is gone.
    """
    with contextlib.suppress(OSError):
        return _free(directory) < RESERVE_BYTES
    return False


def _counts(directory: Path) -> bool:
    """Returns whether a machine runs, or has just been ended for its disk, which may take a while to be removed."""
    if qemu.live_pid(directory / qemu.PIDFILE) is not None:
        return True
    with contextlib.suppress(OSError):
        return abs(time.time() - (directory / EVICTED).stat().st_mtime) < LEAVING_SECONDS
    return False


def evict(directory: Path, end: Callable[[], bool]) -> None:
    """Ends a machine and removes its disk, so that the others can live.

    Args:
        end: ends the machine; returns whether that worked.
    """
    used_gib = _used(directory / OVERLAY) / GIB
    # First: a process that sees that the machine has ended must find out why, and not blame the host.
    with contextlib.suppress(OSError):
        reason = f"it was ended because the host's disk was nearly full: its own took {used_gib:.1f} GiB"
        write_atomically(directory / EVICTED, reason)
    if end():
        with contextlib.suppress(OSError):
            (directory / OVERLAY).unlink()


def eviction(directory: Path) -> str:
    """Returns why the machine was ended, if the host's disk was the reason; otherwise an empty text."""
    return read_end(directory / EVICTED, REASON_BYTES).decode(errors="replace")
