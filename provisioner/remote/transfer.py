"""Copies files between the controller and a machine, as tar streams over SSH. The machine is not trusted."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from provisioner.errors import TaskError, UsageError
from provisioner.remote.ssh import COPY_SECONDS, Connection

DOWNLOAD_LIMIT_BYTES = 4 << 30
MAX_ERROR_BYTES = 1 << 16
# Far below Python's recursion limit, which its removal of directories meets.
MAX_DEPTH = 100
# Larger than any piece in which tarfile reads a file's contents.
MAX_READ_BYTES = 1 << 20


def upload(connection: Connection, source: Path, destination: str) -> int:
    """Copies a file or directory into a machine.

    Args:
        source: the path on the controller.
        destination: the new path; a source copied to an existing directory, or to a path ending in /, keeps its name.

    Returns:
        the number of regular files copied.

    Raises:
        UsageError: the source does not exist, or the destination cannot be written.
    """
    if not source.exists():
        raise UsageError(f"{source} does not exist.")
    count = 0

    def fill(archive: tarfile.TarFile) -> None:
        nonlocal count
        archive.add(source, arcname="payload")
        count = sum(1 for member in archive.getmembers() if member.isfile())

    script = """
    destination=$1 name=$2
    case $destination in */) mkdir -p -- "$destination" ;; esac
    if [ -d "$destination" ]; then destination=${destination%/}/$name; fi
    work=$(mktemp -d -- "$(dirname -- "$destination")/.copy.XXXXXX")
    trap 'rm -rf -- "$work"' EXIT
    tar -x --no-same-owner -C "$work"
    rm -rf -- "$destination"
    mv -T -- "$work/payload" "$destination"
    """
    sent = connection.send_tree(["sh", "-ec", script, "sh", destination, source.resolve().name], fill)
    if sent.exit_code != 0:
        raise UsageError(
            f"{destination} could not be written in the machine.", details=sent.stderr.decode(errors="replace")[-1000:]
        )
    return count


@dataclass(frozen=True)
class Downloaded:
    """Holds the result of a download.

    Args:
        files: the number of regular files copied.
        skipped: the paths of links, devices and sockets, which are not copied.
    """

    files: int
    skipped: tuple[str, ...]


def download(connection: Connection, source: str, destination: Path) -> Downloaded:
    """Copies a file or directory out of a machine. Skips links and devices; drops owners and special permission bits.

    Args:
        source: the path in the machine.
        destination: the path on the controller; a source copied to an existing directory keeps its name.

    Raises:
        UsageError: the source cannot be read, or the destination cannot be written.
        TaskError: the machine sent nothing usable, or more than 4 GiB.
    """
    path = PurePosixPath(source)
    name = path.name
    target = destination / name if destination.is_dir() else destination
    if target.exists() and target.is_dir():
        raise UsageError(f"{target} exists and is a directory.")
    if not target.parent.is_dir() or not os.access(target.parent, os.W_OK | os.X_OK):
        raise UsageError(f"{target.parent} is not a directory in which you may write.")
    with tempfile.TemporaryFile() as spool, tempfile.TemporaryDirectory(dir=target.parent) as work:
        received = 0

        def take(data: bytes) -> None:
            nonlocal received
            received += len(data)
            if received > DOWNLOAD_LIMIT_BYTES:
                raise TaskError(f"{source} is larger than {DOWNLOAD_LIMIT_BYTES >> 30} GiB.")
            spool.write(data)

        argv = ["tar", "-c", "--hard-dereference", "-C", str(path.parent), "--", name]
        done = connection.run(argv, on_stdout=take, limit_bytes=MAX_ERROR_BYTES, timeout_seconds=COPY_SECONDS)
        if done.exit_code != 0:
            raise UsageError(
                f"{source} could not be read in the machine.", details=done.stderr.decode(errors="replace")[-1000:]
            )
        spool.seek(0)
        try:
            # Of tarfile itself nothing bounds what it reads at once: a header of its extended format may be any size.
            with tarfile.open(fileobj=_BoundedReader(spool), mode="r:") as archive:
                downloaded = _unpack(archive, Path(work), name)
            (Path(work) / name).rename(target)
        except (tarfile.TarError, OSError, ValueError) as error:
            raise TaskError(f"{source}: the machine sent an archive that cannot be unpacked: {error}") from error
    return downloaded


class _BoundedReader(io.RawIOBase):
    """Reads a spooled archive in pieces of bounded size, and refuses larger ones.

    Args:
        spool: the archive.
    """

    def __init__(self, spool: IO[bytes]) -> None:
        self._spool = spool

    def read(self, size: int = -1, /) -> bytes:
        """Reads a piece.

        Raises:
            tarfile.TarError: it is too large, or not bounded.
        """
        if not 0 <= size <= MAX_READ_BYTES:
            raise tarfile.ReadError("a header is too large")
        return self._spool.read(size)

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Moves to another position."""
        return self._spool.seek(offset, whence)

    def tell(self) -> int:
        """Returns the position."""
        return self._spool.tell()


def _unpack(archive: tarfile.TarFile, directory: Path, top: str) -> Downloaded:
    """Unpacks files and directories into a new directory. Creates no links, so none can be followed.

    Does not use tarfile's filters: they came with Python 3.11.4, and Debian 12 has 3.11.2.
    """
    files, skipped = 0, []
    for member in archive:
        parts = PurePosixPath(member.name).parts
        if parts[:1] != (top,) or ".." in parts:
            raise tarfile.TarError(f"its member {member.name[:200]!r} lies outside the requested path")
        if len(parts) > MAX_DEPTH:
            raise tarfile.TarError(f"its directories are nested more than {MAX_DEPTH} deep")
        if member.issparse():  # a few bytes of archive would become any number of bytes on the disk
            raise tarfile.TarError(f"its member {member.name[:200]!r} is sparse")
        path = directory.joinpath(*parts)
        if member.isdir():
            path.mkdir(exist_ok=True)
        elif member.isreg() and (content := archive.extractfile(member)):
            with content, path.open("xb") as file:
                shutil.copyfileobj(content, file)
            path.chmod(path.stat().st_mode | (0o100 & member.mode))
            files += 1
        else:
            skipped.append(member.name)
    if not (directory / top).exists():
        raise tarfile.TarError("it holds no file or directory of that name")
    return Downloaded(files, tuple(skipped))
