"""Creates, opens and copies machines' disks: copy-on-write layers over an image or a template.

Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

from provisioner.base import child_environment

# In a machine's directory: the disk that its own is a layer over, and what tells it from a later one of that name.
LOWER = "disk_lower"

# The beginning of a qcow2 file (QEMU's docs/interop/qcow2.txt): magic, version, the size that a machine sees, whether
# the file is encrypted, then fields up to the features that a reader must know. Of those only the first is harmless: it
# was not closed.
_HEADER = struct.Struct(">4sI 16x Q I 36x Q")
_CLOSED_BADLY = 1
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
    _run("create", "-q", "-f", "qcow2", *(_backing(lower) if lower else ()), str(layer), *size)


def _backing(lower: Path) -> tuple[str, ...]:
    return "-b", str(lower.resolve()), "-F", "raw" if lower.suffix == ".raw" else "qcow2"


def _run(*arguments: str) -> None:
    subprocess.run(
        ["qemu-img", *arguments],
        check=True, stdin=subprocess.DEVNULL, env=child_environment.for_program(os.environ), timeout=REBASE_SECONDS,
    )  # fmt: skip


def copy(layer: Path, target: Path) -> None:
    """Copies a layer, whose machine stands still, without its holes and without copying where files can share blocks.

    Raises:
        OSError: there is no such layer.
        subprocess.SubprocessError: it could not be copied, as for want of room, or not in a time that fits its size.
    """
    argv = ["cp", "--no-dereference", "--reflink=auto", "--sparse=auto", "--", str(layer), str(target)]
    seconds = REBASE_SECONDS + layer.lstat().st_blocks * 512 / COPIED_BYTES_PER_SECOND
    subprocess.run(
        argv,
        check=True, stdin=subprocess.DEVNULL, env=child_environment.for_program(os.environ), timeout=seconds,
    )  # fmt: skip


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
    _run("rebase", "-q", "-u", "-f", "qcow2", *_backing(lower), str(layer))
    if lower.resolve() != image.resolve():
        _run("rebase", "-q", "-f", "qcow2", "-t", "unsafe", *_backing(image), str(layer))


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
    if magic != b"QFI\xfb" or version != 3 or size > gib << 30 or encrypted or needs & ~_CLOSED_BADLY:
        raise UntrustworthyLayerError(f"{layer.name} is not a disk as QEMU makes it for a machine")


@contextlib.contextmanager
def opened(layer: Path) -> Iterator[tuple[int, int]]:
    """Opens a layer for QEMU, and yields a descriptor to read and write, and one to read only."""
    with layer.open("r+b") as both, layer.open("rb") as reading:
        yield both.fileno(), reading.fileno()
