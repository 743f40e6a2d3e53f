"""Packs a file or directory of this computer for a machine: the same bytes whenever and wherever the same is packed."""

from __future__ import annotations

import tarfile
from pathlib import Path, PurePosixPath

from provisioner.errors import UsageError

# 2000-01-01: an archive's name comes from its bytes, and zip files can hold no time before 1980.
TIME = 946_684_800
# Inspect writes its logs where it is started, often into the eval's own directory. Copies of them would make another
# image of it for each eval, and hold the answers of earlier ones.
LOG_SUFFIX = ".eval"


def pack(source: Path, target: str, directory: Path) -> str:
    """Writes an archive with one member, or one directory, which has the name of the archive without `.tar`.

    Owner and group of all is root. Links are kept as they are. Inspect's logs are left out of a directory, with the
    directories in which nothing else is.

    Args:
        source: what is packed.
        target: the path of the archive in the machine, NAME.tar.
        directory: where the archive is written here.

    Returns:
        its path here.

    Raises:
        UsageError: a file cannot be read, or is neither a file, a directory nor a link.
    """
    path = directory / PurePosixPath(target).name
    root = source.resolve()

    def packed(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        inside = PurePosixPath(member.name).relative_to(path.stem)
        return None if inside.parts and _is_of_logs(root / inside) else _same_for_all(member)

    try:
        with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as archive:
            archive.add(root, path.stem, filter=packed)
    except OSError as error:
        raise UsageError(f"{error.filename or source} cannot be copied: {error.strerror or error}.") from error
    return str(path)


def _is_of_logs(path: Path) -> bool:
    """Returns whether a path is a log of Inspect, or a directory with logs alone."""
    if path.is_symlink() or not path.is_dir():
        return path.suffix == LOG_SUFFIX
    entries = list(path.iterdir())
    return bool(entries) and all(entry.suffix == LOG_SUFFIX for entry in entries)


def _same_for_all(member: tarfile.TarInfo) -> tarfile.TarInfo:
    if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
        raise UsageError(f"{member.name} is neither a file, a directory nor a link, and cannot be copied.")
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    member.mtime = TIME
    return member
