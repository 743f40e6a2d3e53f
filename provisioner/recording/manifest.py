"""Seals a directory of files: names, sizes and hashes, chained, so that one hash stands for all of it; and checks that.

The first link of the chain is the hash of the facts. Each further link is the hash of a file's entry, which contains
the link before it. A published result carries the last link, the head. A manifest is untrusted when it is checked: it
names files in its own directory only, and no more is read of them than it says.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from provisioner.base import strict_json
from provisioner.base.models import Record

MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 4 << 20
MAX_FILES = 5000
# No recorded file gets as long.
MAX_FILE_BYTES = 1 << 30
# Of all files together: a sparse file can claim more bytes than any program can read.
MAX_TOTAL_BYTES = 64 << 30
CHUNK_BYTES = 1 << 20

Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
# One name in the directory itself, and none that begins with a dot.
_FILE_NAME = r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}$"
FileName = Annotated[str, Field(pattern=_FILE_NAME)]


class Entry(Record):
    """One file.

    Args:
        previous: the hash of the entry before, or of the facts.
    """

    name: FileName
    bytes: int = Field(ge=0, le=MAX_FILE_BYTES)
    sha256: Hash
    previous: Hash


class Manifest(Record):
    """What a directory held when it was sealed.

    Args:
        facts: what the files are about, such as images, versions and score.
        head: the hash that stands for all of it.
    """

    version: Literal[1] = 1
    facts: dict[str, Any]
    entries: tuple[Entry, ...] = Field(max_length=MAX_FILES)
    head: Hash


def seal(
    directory: Path,
    facts: dict[str, Any],
    write: Callable[[Path, str], None],
    names: Sequence[str] | None = None,
) -> str:
    """Writes the manifest of a directory's regular files, and returns its head.

    Args:
        write: writes a file atomically.
        names: the files; None for all whose names a manifest may hold.

    Raises:
        OSError: a file cannot be read, or the manifest cannot be written. There is then no new manifest.
        ValueError: the facts are too large, or the files too many.
    """
    with _locked(directory, fcntl.LOCK_EX):
        previous = _hash({"version": 1, "facts": facts})
        entries = []
        for name in sorted((path.name for path in directory.iterdir()) if names is None else names):
            if (
                name == MANIFEST
                or not re.fullmatch(_FILE_NAME, name)
                or not stat.S_ISREG((directory / name).lstat().st_mode)
            ):
                continue
            size, digest = _digest(directory / name, MAX_FILE_BYTES)
            entry = Entry(name=name, bytes=size, sha256=digest, previous=previous)
            entries.append(entry)
            previous = _hash(entry.model_dump())
        manifest = Manifest(facts=facts, entries=tuple(entries), head=previous)
        text = manifest.model_dump_json(indent=1)
        if len(text) > MAX_MANIFEST_BYTES or sum(entry.bytes for entry in entries) > MAX_TOTAL_BYTES:
            limits = f"{MAX_MANIFEST_BYTES} bytes, or its files {MAX_TOTAL_BYTES}"
            raise ValueError(f"its manifest would have more than {limits}")
        write(directory / MANIFEST, text)
        return manifest.head


@contextlib.contextmanager
def unsealed(directory: Path) -> Iterator[bool]:
    """Yields whether a directory is not sealed yet. No process seals it before the context ends."""
    with _locked(directory, fcntl.LOCK_SH):
        yield not (directory / MANIFEST).exists()


@contextlib.contextmanager
def _locked(directory: Path, kind: int) -> Iterator[None]:
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(opened, kind)
        yield
    finally:
        os.close(opened)


def load(directory: Path) -> Manifest:
    """Reads the manifest of a directory.

    Raises:
        OSError: the directory has no manifest, or it is not a regular file.
        ValueError: the manifest is not valid, or too large.
    """
    data = read(directory, MANIFEST, MAX_MANIFEST_BYTES)
    value = strict_json.parse(data, limit_bytes=MAX_MANIFEST_BYTES, maximum_values=20 * MAX_FILES, constants=True)
    manifest = Manifest.model_validate(value)
    if sum(entry.bytes for entry in manifest.entries) > MAX_TOTAL_BYTES:
        raise ValueError(f"its files have more bytes than {MAX_TOTAL_BYTES}")
    return manifest


def read(directory: Path, name: str, limit_bytes: int) -> bytes:
    """Reads one of a directory's regular files. Follows no link.

    Raises:
        OSError: there is none, or it is no regular file.
        ValueError: it is longer than the limit.
    """
    with _regular(directory / name) as descriptor, open(descriptor, "rb", closefd=False) as file:
        data = file.read(limit_bytes + 1)
    if len(data) > limit_bytes:
        raise ValueError(f"it has more than {limit_bytes} bytes")
    return data


def problems(directory: Path, manifest: Manifest) -> list[tuple[str, str]]:
    """Compares a directory with its manifest, and a manifest with its own head. Changes nothing, follows no link.

    Returns:
        for each file that is not as it was, its name and what is wrong with it.
    """
    found: list[tuple[str, str]] = []
    previous = _hash({"version": manifest.version, "facts": manifest.facts})
    chained = True
    for entry in manifest.entries:
        chained = chained and entry.previous == previous
        previous = _hash(entry.model_dump())
        if wrong := _wrong(directory / entry.name, entry):
            found.append((entry.name, wrong))
    if not chained or manifest.head != previous:
        found.insert(0, (MANIFEST, "its chain of hashes is broken"))
    if len({MANIFEST, *(entry.name for entry in manifest.entries)}) <= len(manifest.entries):
        found.append((MANIFEST, "it names a file twice, or itself"))
    return found


def added(directory: Path, manifest: Manifest) -> list[str]:
    """Returns the names in a directory that its manifest does not know: files that were added later."""
    known = {MANIFEST, *(entry.name for entry in manifest.entries)}
    with os.scandir(directory) as entries:
        names = (entry.name for entry in entries if entry.name not in known)
        return sorted(name for name, _ in zip(names, range(MAX_FILES), strict=False))


def _wrong(path: Path, entry: Entry) -> str:
    try:
        with _regular(path) as file:
            if (size := os.fstat(file).st_size) != entry.bytes:
                return f"it has {size} bytes, not {entry.bytes}"
        _, digest = _digest(path, entry.bytes)
    except FileNotFoundError:
        return "it is missing"
    except (OSError, ValueError) as error:
        return f"it cannot be read: {error}"
    return "" if digest == entry.sha256 else "its contents have changed"


@contextlib.contextmanager
def _regular(path: Path) -> Iterator[int]:
    """Opens a regular file, and nothing else: no link either.

    Raises:
        OSError: it is none, or cannot be read.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    file = os.open(path, flags)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError("it is no regular file")
        yield file
    finally:
        os.close(file)


def _digest(path: Path, limit_bytes: int) -> tuple[int, str]:
    """Returns a file's size and hash.

    Raises:
        ValueError: it is longer than the limit.
        OSError: it cannot be read.
    """
    size, digest = 0, hashlib.sha256()
    with _regular(path) as file:
        while data := os.read(file, CHUNK_BYTES):
            size += len(data)
            if size > limit_bytes:
                raise ValueError(f"it has more than {limit_bytes} bytes")
            digest.update(data)
    return size, digest.hexdigest()


def _hash(value: dict[str, Any]) -> str:
    """Returns the hash of a value as JSON in one form: sorted keys, no spaces, ASCII."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
