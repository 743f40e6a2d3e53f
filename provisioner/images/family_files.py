"""Adds a family's files to the archives that builders get."""

from __future__ import annotations

import contextlib
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from provisioner.copying.transfer import Fill
from provisioner.errors import ImageBuildError
from provisioner.validation import shown

HOME = "/root"
# Shorter values would match by accident.
SECRET_SCAN_MIN_LENGTH = 8
WITHOUT_SECRETS = (
    "Leave the file out of the family, and let install() write none. If the task needs the file: list the variable in "
    "required_environment_variables, and write the file in start(), from os.environ. "
    "docs/authoring/secrets.md#give-the-agent-a-file-with-a-secret shows how."
)


@contextlib.contextmanager
def reading(file: str) -> Iterator[None]:
    """Reads a file of a family in its body.

    Raises:
        ImageBuildError: the file cannot be read, as when it was removed or cut off meanwhile.
    """
    try:
        yield
    except OSError as error:
        raise ImageBuildError(
            f"{shown(file)} cannot be read: {error.strerror or error}.",
            hint="If the file changed meanwhile, run the command again.",
        ) from error


def filler(source: Path, files: Iterable[str]) -> Fill:
    """Returns what adds files to an archive. Root owns them there; in /root the agent cannot read them.

    It raises ImageBuildError if one cannot be read.
    """

    def owned_by_root(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = 0
        info.uname = info.gname = "root"
        info.mode = 0o755 if info.isdir() or info.mode & 0o100 else 0o644
        return info

    def fill(archive: tarfile.TarFile) -> None:
        for name in files:
            with reading(name):
                archive.add(source / name, arcname=name, recursive=False, filter=owned_by_root)

    return fill
