"""Bounds what machines' disks take from the host's disk: checked before a launch, and watched while they run.

A machine's disk is a sparse layer over its image and may grow to its whole size. Few ever do, so each machine is sure
of a share of its disk only, and may take more while the host has it. When the host's disk is nearly full, the machine
that is furthest beyond its share ends, as Kubernetes evicts pods under disk pressure. A machine that has ended keeps
its disk until it is destroyed, as its operator may still want that, but it keeps no other alive. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from provisioner.base.errors import CapacityError
from provisioner.clouds.local.vm import qemu
from provisioner.store.files import read_end, write_atomically

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
    if not nearly_full(directory):  # as nearly always: nothing else need be looked at
        return False
    existing = [each for each in overlays(directory.parent.parent) if _runs(each.directory) or _leaves(each.directory)]
    # What is free is looked at last: a disk that is removed before that counts for neither.
    return is_first_to_go(directory, existing, _free(directory))


def nearly_full(directory: Path) -> bool:
    """Returns whether the file system that a directory lies in has less left than the controller needs."""
    return _free(directory) < RESERVE_BYTES


def _runs(directory: Path) -> bool:
    return qemu.live_pid(directory / "qemu.pid") is not None


def _leaves(directory: Path) -> bool:
    """Returns whether a machine has just been ended for its disk, which may take a while to be removed."""
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


def fills_host(directory: Path) -> bool:
    """Whether the machine is the one that fills the host's disk: it has to end, or has been ended.

    Raises:
        OSError: the directory cannot be read.
    """
    return must_go(directory) or bool(eviction(directory))
