"""The files of a family that go into a machine: listed, held inside the family directory, and hashed.

Reads files only. A link is copied as a link, so it must lead to the same place in the machine: relative, and inside.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

from provisioner.errors import TaskFamilyError
from provisioner.validation import shown

MAXIMUM_FILES = 50_000
MAXIMUM_TOTAL_BYTES = 8 << 30

# What no task needs and every checkout has. Few on purpose: a stray .pyc or .env may be the task itself.
SKIPPED_NAMES = frozenset({"__pycache__", ".DS_Store", ".pytest_cache", ".mypy_cache", ".ruff_cache"})
SKIPPED_AT_TOP = frozenset({".git", ".venv"})


def is_skipped(relative: Path) -> bool:
    """Whether a path, relative to the family directory, is left out of machines."""
    parts = relative.parts
    return bool(parts) and (parts[0] in SKIPPED_AT_TOP or not SKIPPED_NAMES.isdisjoint(parts))


def list_files(root: Path, directory: Path | None = None) -> tuple[str, ...]:
    """The files and links to copy, sorted, relative to `root`, with `/` between names.

    Args:
        root: the family directory, resolved.
        directory: a directory in it to list instead of all.

    Raises:
        TaskFamilyError: a link leads out, a file is neither regular nor a link, or there are too many or too large.
    """
    found: list[str] = []
    total_bytes = 0
    for path in _walk(root, directory or root):
        found.append(path.relative_to(root).as_posix())
        total_bytes += _checked_size(path, root)
        if len(found) > MAXIMUM_FILES:
            raise TaskFamilyError(f"{root} holds more than {MAXIMUM_FILES} files.")
        if total_bytes > MAXIMUM_TOTAL_BYTES:
            raise TaskFamilyError(f"The files in {root} are larger than {MAXIMUM_TOTAL_BYTES >> 30} GiB together.")
    return tuple(sorted(found))


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


def _checked_size(path: Path, root: Path) -> int:
    name = shown(os.fsencode(path.relative_to(root)).decode("utf-8", "backslashreplace"))
    try:
        str(path).encode("utf-8")
    except UnicodeEncodeError:
        raise TaskFamilyError(f"The file name {name} is not UTF-8.") from None
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        _check_link(path, root, name)
        return 0
    if not stat.S_ISREG(status.st_mode):
        raise TaskFamilyError(f"{name} is a {_kind(status.st_mode)}; only files, directories and links can be copied.")
    return status.st_size


def _check_link(path: Path, root: Path, name: str) -> None:
    target = path.readlink()
    if target.is_absolute():
        raise TaskFamilyError(f"The link {name} is absolute; make it relative, inside the family directory.")
    try:
        path.stat()
    except OSError as error:
        # Path.resolve() tells of a circle in another way in each version of Python.
        if error.errno == errno.ELOOP:
            raise TaskFamilyError(f"The link {name} leads in a circle.") from None
    resolved = path.resolve()
    # Both ways of looking: through other links, and name by name, since `../family/x` is elsewhere in the machine.
    lexical = Path(os.path.normpath(path.parent.relative_to(root) / target))
    if lexical.parts[:1] == ("..",) or not resolved.is_relative_to(root):
        raise TaskFamilyError(f"The link {name} leads out of the family directory, to {shown(str(target))}.")


def _kind(mode: int) -> str:
    tests = {"socket": stat.S_ISSOCK, "fifo": stat.S_ISFIFO, "device": stat.S_ISBLK}
    return next((kind for kind, test in tests.items() if test(mode)), "device")


def digest_files(root: Path, files: Iterable[str]) -> str:
    """SHA-256, in hex, over relative paths, executable bits, link targets and contents.

    Raises:
        TaskFamilyError: a file cannot be read.
    """
    whole = sha256()
    for name in files:
        path = root / name
        try:
            fields = _fields(path)
        except OSError as error:
            raise TaskFamilyError(f"{shown(name)} cannot be read: {error.strerror}.") from error
        for field in (name.encode(), *fields):
            # Each field with its length before it, so that no two lists of fields read the same.
            whole.update(len(field).to_bytes(8, "big") + field)
    return whole.hexdigest()


def _fields(path: Path) -> tuple[bytes, bytes]:
    if path.is_symlink():
        return b"link", os.fsencode(path.readlink())
    kind = b"program" if path.stat().st_mode & stat.S_IXUSR else b"file"
    contents = sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            contents.update(block)
    return kind, contents.digest()
