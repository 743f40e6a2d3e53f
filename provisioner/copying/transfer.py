"""Copies files between the controller and a machine. The machine is not trusted, nor are other users of either side."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from provisioner.base.errors import HostError, ProvisionerError, TaskError, UsageError
from provisioner.base.printable import last_lines
from provisioner.copying import copy_program, directories
from provisioner.copying.copy_program import TOP
from provisioner.copying.directories import open_destination, working_directory
from provisioner.copying.trees import FREE_BYTES, DiskFullError, TreeError, TreeReader, TreeWriter
from provisioner.ssh.calls import Calls
from provisioner.ssh.exchange import Completed

# The largest copy, 4 GiB, at a bit more than 1 MiB/s.
COPY_SECONDS = 3600.0
MAX_ERROR_BYTES = 1 << 16

Fill = Callable[[tarfile.TarFile], None]


@dataclass(frozen=True)
class Downloaded:
    """Holds the result of a download.

    Args:
        files: the number of regular files copied.
        skipped: the paths of what is not copied: links, devices, sockets, names with control characters. At most 100.
        skipped_count: how many there are.
    """

    files: int
    skipped: tuple[str, ...]
    skipped_count: int


def upload(connection: Calls, source: Path, destination: str, user: str = "root") -> int:
    """Copies a file or directory into a machine, where it replaces what was there.

    Args:
        source: the path on the controller.
        destination: the new path; a source copied to an existing directory, or to a path ending in /, keeps its name.
        user: the user that writes it; a relative path is in that user's home.

    Returns:
        the number of regular files copied.

    Raises:
        UsageError: the source does not exist or cannot be read, or the destination cannot be written.
        HostError: the source cannot be packed, or there is no room for that.
        TaskError: the machine did not take it in time.
    """
    if not source.exists():
        raise UsageError(f"{source} does not exist.")
    count = 0

    def fill(archive: tarfile.TarFile) -> None:
        nonlocal count
        archive.add(source, arcname=TOP)
        count = sum(1 for member in archive.getmembers() if member.isfile())

    sent = send_archive(connection, fill, "receive", destination, source.resolve().name, user=user)
    if sent.exit_code != 0:
        raise UsageError(
            f"{destination} could not be written in the machine.",
            details=last_lines(sent.stderr.decode(errors="replace"), 1000),
        )
    return count


def send_archive(connection: Calls, fill: Fill, *arguments: str, user: str) -> Completed:
    """Sends a tar archive to copy_program in a machine, for an hour at most.

    Args:
        fill: called with the open archive; adds the members.
        arguments: copy_program's, which say where the archive is unpacked.
        user: the user that unpacks it.

    Raises:
        UsageError, HostError: as for `packed`.
        MachineLostError, CommandTimeoutError, TaskError: as for Calls.run.
    """
    with packed(fill) as archive:
        return send_input(connection, archive, *arguments, user=user)


@contextlib.contextmanager
def packed(fill: Fill) -> Iterator[IO[bytes]]:
    """Packs a tar archive into a temporary file, and yields that.

    Args:
        fill: called with the open archive; adds the members.

    Raises:
        UsageError: a file cannot be read.
        HostError: there is no room for the archive, a file's disk fails, or a file was cut off meanwhile.
    """
    with contextlib.ExitStack() as opened:
        try:
            spool = tempfile.TemporaryFile()  # noqa: SIM115
        except OSError as error:
            raise _no_room(error) from error
        opened.callback(_close, spool)
        packing = ""
        try:
            with _Packing(fileobj=spool, mode="w", format=tarfile.PAX_FORMAT) as archive:
                try:
                    fill(archive)
                finally:
                    packing = archive.latest
            spool.seek(0)
        except OSError as error:
            raise _packing_error(error, packing) from error
        yield spool


class _Packing(tarfile.TarFile):
    latest = ""

    def addfile(self, tarinfo: tarfile.TarInfo, fileobj: Any = None) -> None:
        self.latest = tarinfo.name
        super().addfile(tarinfo, fileobj)


def _close(spool: IO[bytes]) -> None:
    with contextlib.suppress(OSError):  # on a full disk, it would write again what did not fit
        spool.close()


def _no_room(error: OSError) -> HostError:
    return HostError(
        f"The files for the machine cannot be packed: {error.strerror or error}.",
        hint="They are packed in a temporary file; TMPDIR names another directory for it.",
    )


def _packing_error(error: OSError, packing: str) -> ProvisionerError:
    said = error.strerror or error
    if error.filename is not None:
        return UsageError(f"{error.filename} cannot be read: {said}.")
    if not packing or error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _no_room(error)
    return HostError(f"{packing.removeprefix(f'{TOP}/')} cannot be packed: {said}.")


def send_input(connection: Calls, data: IO[bytes], *arguments: str, user: str) -> Completed:
    """Sends bytes to copy_program in a machine, for an hour at most.

    Args:
        arguments: copy_program's, which say what the bytes are for.
        user: the user that runs it.

    Raises:
        MachineLostError, CommandTimeoutError, TaskError: as for Calls.run.
    """
    return connection.run(
        ["copy_program.py", *arguments],
        user=user,
        program=_program(),
        stdin=data,
        limit_bytes=MAX_ERROR_BYTES,
        timeout_seconds=COPY_SECONDS,
    )


def download(connection: Calls, source: str, destination: Path, user: str = "root") -> Downloaded:
    """Copies a file or directory out of a machine. Nothing appears at the destination until all has arrived.

    Copies contents and the permission to execute. Skips links and special files.

    Args:
        source: the path in the machine.
        destination: the path on the controller; a source copied to an existing directory keeps its name. A file that
            exists is replaced by a file; anything else that exists is left alone.
        user: the user that reads it; a relative path is in that user's home.

    Raises:
        UsageError: the source cannot be read, or the destination exists or cannot be written.
        HostError: the disk would have less than 256 MiB left.
        TaskError: the machine sent nothing usable, more than 4 GiB or 250,000 entries, or for more than an hour.
    """
    with contextlib.ExitStack() as opened:
        try:
            parent, name = opened.enter_context(open_destination(str(destination), PurePosixPath(source).name))
            _require_replaceable(parent, name, destination)
            work = opened.enter_context(working_directory(parent))
        except OSError as error:
            raise _unwritable(destination, error) from error
        reader = _receive(connection, source, work, user)
        try:
            os.rename(TOP, name, src_dir_fd=work, dst_dir_fd=parent)
        except OSError as error:
            raise _unwritable(destination, error) from error
    top = PurePosixPath(source).name
    return Downloaded(reader.files, tuple(f"{top}/{path}" for path in reader.skipped_paths), reader.skipped)


def _require_replaceable(parent: int, name: str, destination: Path) -> None:
    try:
        mode = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        kind = "a directory" if stat.S_ISDIR(mode) else "a link or special file"
        raise UsageError(f"{destination}: {name} exists and is {kind}.", hint="Remove it, or choose another path.")


def _unwritable(destination: Path, error: OSError) -> UsageError:
    cause = error.strerror if error.filename in (None, TOP) else f"{error.filename}: {error.strerror}"
    hint = "Give the path to which the link leads." if error.errno == errno.ELOOP else None
    return UsageError(f"{destination} cannot be written: {cause}.", hint=hint)


def _receive(connection: Calls, source: str, work: int, user: str) -> TreeReader:
    """Receives a tree into the working directory."""
    with TreeWriter(work) as writer:
        reader = TreeReader(writer)
        try:
            done = connection.run(
                ["copy_program.py", "send", source],
                user=user,
                program=_program(),
                on_stdout=reader.feed,
                limit_bytes=MAX_ERROR_BYTES,
                timeout_seconds=COPY_SECONDS,
            )
            if done.exit_code != 0:
                raise UsageError(
                    f"{source} could not be read in the machine.",
                    details=last_lines(done.stderr.decode(errors="replace"), 1000),
                )
            reader.finish()
        except TreeError as error:
            raise TaskError(f"{source}: what the machine sent cannot be copied: {error}.") from error
        except TimeoutError as error:
            raise TaskError(f"{source} did not arrive within an hour.") from error
        except DiskFullError as error:
            raise HostError(
                f"{source} does not fit: the disk would have less than {FREE_BYTES >> 20} MiB or too few inodes left.",
                hint="Free some space, or copy to another disk.",
            ) from error
    return reader


def _program() -> str:
    """Returns the text of copy_program for a machine, whose own files may be older or altered."""
    lines = [
        line
        for module in (directories, copy_program)
        for line in Path(str(module.__file__)).read_text().splitlines()
        if not line.startswith(("from __future__ ", "from provisioner."))
    ]
    return "\n".join(["from __future__ import annotations", *lines])
