"""Makes images of builders' disks: each a layer over its base image alone, with all that was in between."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from provisioner.base import child_environment
from provisioner.base.errors import CapacityError, ImageBuildError, InfrastructureError
from provisioner.base.models import MachineRecord
from provisioner.clouds.local import images
from provisioner.clouds.local.frozen import snapshots
from provisioner.clouds.local.vm import disk, disk_layers, qemu
from provisioner.store.images import ImageStore

DISK = "disk.qcow2"


def capture(store: ImageStore, builder: MachineRecord, directory: Path, destination: Path) -> None:
    """Moves the disk of a builder that is powered off.

    Args:
        builder: the machine.
        directory: the machine's.
        destination: the image's directory.

    Raises:
        ImageBuildError: the builder's disk is not what it must be, as after an attack on its QEMU, or its template is
            gone.
    """
    layer = directory / disk.OVERLAY
    try:
        base = _put_over_base(store, builder, directory, layer)
    except disk_layers.UNUSABLE as error:
        raise _unusable(error) from error
    captured = destination / DISK
    layer.rename(captured)
    _complete(captured, base)


def copy(store: ImageStore, builder: MachineRecord, directory: Path, destination: Path, room_bytes: int) -> None:
    """Copies the disk of a builder that runs. It stands still meanwhile.

    Args:
        room_bytes: what the copy may take.

    Raises:
        CapacityError: it would take more.
        InfrastructureError: QEMU or the copy failed.
        ImageBuildError: as for `capture`.
    """
    copied = destination / DISK
    try:
        layers = (directory / disk.OVERLAY, disk_layers.noted_below(directory))
        needed = sum(each.stat().st_blocks * 512 for each in layers if each.suffix != ".raw")
        if needed > room_bytes:
            raise CapacityError(f"The disk of this host has no room for another {needed / disk.GIB:.1f} GiB.")
        with snapshots.held(directory) as qmp:
            qmp.execute("stop")  # QEMU then writes what it has not written yet
            disk_layers.copy(directory / disk.OVERLAY, copied)
        _complete(copied, _put_over_base(store, builder, directory, copied))
    except (disk_layers.UntrustworthyLayerError, disk_layers.ReplacedBelowError) as error:
        raise _unusable(error) from error
    except (OSError, subprocess.SubprocessError, qemu.QMPError) as error:  # such as a disk that became full meanwhile
        raise InfrastructureError(f"The builder's disk could not be copied: {error}") from error


def _put_over_base(store: ImageStore, builder: MachineRecord, directory: Path, layer: Path) -> Path:
    """Makes a builder's disk a layer over its base image alone, whose disk it returns.

    Raises:
        OSError, subprocess.SubprocessError: as for `disk_layers.put_over` and `disk_layers.noted_below`.
    """
    name, base = builder.image, store.disk(builder.image)
    while base.suffix != ".raw" and (below := store.load(name).base):
        name, base = below, store.disk(below)
    disk_layers.put_over(layer, disk_layers.noted_below(directory), base, builder.size.disk_gib)
    return base


def _unusable(error: Exception) -> ImageBuildError:
    return ImageBuildError(f"The builder's disk is not used: {error}.", hint="Build the image again.")


def _complete(image: Path, base: Path) -> None:
    """Has a disk name its base by a relative path, puts what boots beside it, and has the host's disk take it."""
    backing = f"../{base.parent.name}/{base.name}"
    subprocess.run(
        ["qemu-img", "rebase", "-q", "-u", "-b", backing, "-F", "raw", image.name],
        cwd=image.parent, check=True, stdin=subprocess.DEVNULL, env=child_environment.for_program(os.environ),
        timeout=disk_layers.REBASE_SECONDS,
    )  # fmt: skip
    for file_name in images.BOOT_FILES:
        os.link(base.parent / file_name, image.parent / file_name)
    with image.open("rb") as file:
        os.fsync(file.fileno())
