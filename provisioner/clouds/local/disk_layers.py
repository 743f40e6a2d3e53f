"""Creates and opens machines' disks: copy-on-write layers over an image or a template. Standard library only."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from provisioner import child_environment


def create(layer: Path, lower: Path, gib: int | None = None) -> None:
    """Creates a layer, or replaces it by an empty one.

    Args:
        lower: the disk below.
        gib: the size that the machine sees; None for that of the disk below.

    Raises:
        subprocess.SubprocessError: qemu-img failed.
    """
    backing = ["-b", str(lower.resolve()), "-F", "raw" if lower.suffix == ".raw" else "qcow2"]
    size = [] if gib is None else [f"{gib}G"]
    layer.unlink(missing_ok=True)
    subprocess.run(
        ["qemu-img", "create", "-q", "-f", "qcow2", *backing, str(layer), *size],
        check=True, stdin=subprocess.DEVNULL, env=child_environment.for_program(os.environ),
    )  # fmt: skip


@contextlib.contextmanager
def opened(layer: Path) -> Iterator[tuple[int, int]]:
    """Opens a layer for QEMU, and yields a descriptor to read and write, and one to read only."""
    with layer.open("r+b") as both, layer.open("rb") as reading:
        yield both.fileno(), reading.fileno()
