"""Lists, checks and hashes the files of a family that are copied into machines, and matches globs of them.

Only reads. A link is copied as a link, so it must be relative and stay inside the family directory: only then does it
lead to the same file in the machine.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import re
import stat
import tarfile
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import IO

from provisioner.base.errors import TaskFamilyError
from provisioner.base.validation import shown

MAXIMUM_GLOBS = 100
MAXIMUM_CHARACTERS = 200
# More would make a path with many parts take long.
MAXIMUM_DEEP = 4
DEEP = "**"


def check_glob(glob: str) -> str:
    """Returns a glob that can only match names inside the family's directory.

    Args:
        glob: parts between `/`, in which `*`, `?` and `[...]` match within a part, and the part `**` any number of
            parts.

    Raises:
        ValueError: it is empty, too long, leads out of the directory, or has a part that no file has.
    """
    parts = glob.split("/")
    if len(glob) > MAXIMUM_CHARACTERS:
        raise ValueError(f"must have at most {MAXIMUM_CHARACTERS} characters")
    if not glob.isprintable() or "\\" in glob:
        raise ValueError("must consist of printable characters, without a backslash")
    if glob.startswith("/"):
        raise ValueError("must be relative to the family's directory")
    if ".." in parts:
        raise ValueError("must not lead out of the family's directory")
    if "" in parts or "." in parts:
        raise ValueError("must be names with a single / between them, such as assets/**")
    if parts.count(DEEP) > MAXIMUM_DEEP:
        raise ValueError(f"must have {DEEP} at most {MAXIMUM_DEEP} times")
    return glob


def matching(globs: Sequence[str], files: Iterable[str]) -> tuple[str, ...]:
    """Returns the files that any of the globs matches, in their order.

    Args:
        globs: that check_glob lets pass.
        files: paths relative to the family's directory.
    """
    compiled = [_compiled(glob) for glob in globs]
    return tuple(name for name in files if any(_matches(parts, name.split("/")) for parts in compiled))


Part = Callable[[str], object] | None


@lru_cache(maxsize=4 * MAXIMUM_GLOBS)
def _compiled(glob: str) -> tuple[Part, ...]:
    # `**` at the end stands for the files below, and not for the directory itself.
    parts = [*glob.split("/"), *(["*"] if glob.split("/")[-1] == DEEP else [])]
    return tuple(None if part == DEEP else re.compile(fnmatch.translate(part)).match for part in parts)


def _matches(glob: Sequence[Part], names: Sequence[str]) -> bool:
    """Returns whether a glob's parts match a path's names, after at most as many tries as their numbers multiplied."""
    # For each number of names that the parts so far can have matched.
    ends = {0}
    for part in glob:
        if part is None:
            ends = set(range(min(ends), len(names) + 1))
        else:
            ends = {end + 1 for end in ends if end < len(names) and part(names[end])}
        if not ends:
            return False
    return len(names) in ends


MAXIMUM_FILES = 50_000
MAXIMUM_TOTAL_BYTES = 8 << 30

# Common in checkouts and needed by no task. The list is short on purpose: a .pyc or .env may be part of the task.
SKIPPED_NAMES = frozenset({"__pycache__", ".DS_Store", ".pytest_cache", ".mypy_cache", ".ruff_cache"})
SKIPPED_AT_TOP = frozenset({".git", ".venv"})


def is_skipped(relative: Path) -> bool:
    """Returns whether a path, relative to the family directory, is left out of machines."""
    parts = relative.parts
    return bool(parts) and (parts[0] in SKIPPED_AT_TOP or not SKIPPED_NAMES.isdisjoint(parts))


def list_files(root: Path, directory: Path | None = None, *, called: str = "the family directory") -> tuple[str, ...]:
    """Lists the files and links to copy: sorted, relative to `root`, with `/` between names.

    Args:
        root: the family directory, or another that links must stay in; resolved.
        directory: a directory below `root`; only its files are listed.
        called: what messages call `root`.

    Raises:
        TaskFamilyError: a link leads out, a file is neither regular nor a link, or the files are too many or too large.
    """
    names: list[str] = []
    total_bytes = 0
    for path in _walk(root, directory or root):
        names.append(path.relative_to(root).as_posix())
        total_bytes += _checked_size(path, root, called)
        if len(names) > MAXIMUM_FILES:
            raise TaskFamilyError(f"{root} contains more than {MAXIMUM_FILES} files.")
        if total_bytes > MAXIMUM_TOTAL_BYTES:
            raise TaskFamilyError(f"The files in {root} exceed {MAXIMUM_TOTAL_BYTES >> 30} GiB in total.")
    return tuple(sorted(names))


def _walk(root: Path, directory: Path) -> Iterable[Path]:
    def refuse(error: OSError) -> None:
        raise TaskFamilyError(f"{shown(str(error.filename))} cannot be read: {error.strerror}.") from error

    for parent, directories, files in os.walk(directory, onerror=refuse):
        here = Path(parent)
        kept = [name for name in directories if not is_skipped((here / name).relative_to(root))]
        links = [name for name in kept if (here / name).is_symlink()]
        directories[:] = [name for name in kept if name not in links]
        for name in files + links:
            if not is_skipped((here / name).relative_to(root)):
                yield here / name


def _checked_size(path: Path, root: Path, called: str) -> int:
    name = shown(os.fsencode(path.relative_to(root)).decode("utf-8", "backslashreplace"))
    try:
        str(path).encode("utf-8")
    except UnicodeEncodeError:
        raise TaskFamilyError(f"The file name {name} is not UTF-8.") from None
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        _check_link(path, root, name, called)
        return 0
    if not stat.S_ISREG(status.st_mode):
        kinds = {stat.S_IFSOCK: "socket", stat.S_IFIFO: "fifo"}
        kind = kinds.get(stat.S_IFMT(status.st_mode), "device")
        raise TaskFamilyError(f"{name} is a {kind}; only files, directories and links can be copied.")
    return status.st_size


def _check_link(path: Path, root: Path, name: str, called: str) -> None:
    target = path.readlink()
    if target.is_absolute():
        raise TaskFamilyError(f"The link {name} is absolute; make it relative, inside {called}.")
    try:
        path.stat()
    except OSError as error:
        # Path.resolve() reports a circle of links differently in each version of Python.
        if error.errno == errno.ELOOP:
            raise TaskFamilyError(f"The link {name} leads in a circle.") from None
    resolved = path.resolve()
    # Check both the resolved path and the names alone: in the machine `../family/x` is another place.
    lexical = Path(os.path.normpath(path.parent.relative_to(root) / target))
    if lexical.parts[:1] == ("..",) or not resolved.is_relative_to(root):
        raise TaskFamilyError(f"The link {name} leads out of {called}, to {shown(str(target))}.")


def digest_files(root: Path, files: Iterable[str]) -> str:
    """Returns the SHA-256, in hex, of relative paths, executable bits, link targets and contents.

    Raises:
        TaskFamilyError: a file cannot be read.
    """
    described = []
    for name in files:
        path = root / name
        try:
            if path.is_symlink():
                described.append((name, b"link", os.fsencode(path.readlink())))
                continue
            with path.open("rb") as file:
                described.append((name, _kind_of_file(path.stat().st_mode), _contents(file)))
        except OSError as error:
            raise TaskFamilyError(f"{shown(name)} cannot be read: {error.strerror}.") from error
    return _digest(described)


def digest_archive(archive: tarfile.TarFile, root: str) -> str:
    """Returns the SHA-256, in hex, of an archive's files and links: paths, executable bits, link targets and contents.

    Args:
        root: the member that all others lie in.
    """
    fields: dict[str, tuple[bytes, bytes]] = {}
    for member in archive:
        if member.issym():
            fields[member.name] = b"link", os.fsencode(member.linkname)
        elif member.islnk():  # tarfile would look through all members for the file that it leads to
            fields[member.name] = _kind_of_file(member.mode), fields[member.linkname][1]
        elif file := archive.extractfile(member):
            fields[member.name] = _kind_of_file(member.mode), _contents(file)
    return _digest(sorted((name.removeprefix(f"{root}/"), *described) for name, described in fields.items()))


def _digest(described: Iterable[tuple[str, bytes, bytes]]) -> str:
    whole = sha256()
    for name, *fields in described:
        for field in (os.fsencode(name), *fields):
            # Each field is preceded by its length, so that no two lists of fields hash alike.
            whole.update(len(field).to_bytes(8, "big") + field)
    return whole.hexdigest()


def _kind_of_file(mode: int) -> bytes:
    return b"program" if mode & stat.S_IXUSR else b"file"


def _contents(file: IO[bytes]) -> bytes:
    contents = sha256()
    while block := file.read(1 << 20):
        contents.update(block)
    return contents.digest()
