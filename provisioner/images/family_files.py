"""Copies a family's files into machines: when its image is built, or, those that the image lacks, before start()."""

from __future__ import annotations

import contextlib
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from provisioner.copying.transfer import Fill, send_input
from provisioner.errors import ImageBuildError, TaskError
from provisioner.family.loader import TaskFamily
from provisioner.models import Environment
from provisioner.printable import last_lines
from provisioner.session import Session
from provisioner.ssh.connection import Connection
from provisioner.validation import shown

HOME = "/root"
# Shorter values would match by accident.
SECRET_SCAN_MIN_LENGTH = 8
PIECE_BYTES = 4 << 20
# Of the files that hold secrets, so many are named.
SHOWN = 10
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


def pack(family: TaskFamily, files: Iterable[str], archive: Path, variables: Mapping[str, str]) -> None:
    """Packs files of a family into an archive, from which machines get them.

    Args:
        variables: the env file's, none of which may be in a file: as in an image, all environments would have it.

    Raises:
        ImageBuildError: a file holds a secret, or cannot be read.
    """
    names = tuple(files)
    secrets = {name: value.encode() for name, value in variables.items() if len(value) >= SECRET_SCAN_MIN_LENGTH}
    found = [
        f"{shown(file)} contains {name}" for file in names for name in _secrets_in(family.directory / file, secrets)
    ]
    if found:
        raise ImageBuildError(
            "The family's files contain secrets: " + "; ".join(found[:SHOWN]),
            hint=WITHOUT_SECRETS,
        )
    with tarfile.open(archive, mode="w", format=tarfile.PAX_FORMAT) as opened:
        filler(family.directory, names)(opened)


def _secrets_in(path: Path, secrets: Mapping[str, bytes]) -> Iterator[str]:
    if not secrets or path.is_symlink():
        return
    longest = max(map(len, secrets.values()))
    names = set()
    with reading(path.name), path.open("rb") as file:
        rest = b""
        while piece := file.read(PIECE_BYTES):
            names |= {name for name, value in secrets.items() if value in rest + piece}
            rest = (rest + piece)[-longest:]
    yield from sorted(names)


def unpack(connection: Connection, archive: Path) -> None:
    """Unpacks a family's files in a machine, where they replace what has their names.

    Raises:
        TaskError: the machine did not take them.
    """
    with archive.open("rb") as file:
        done = send_input(connection, file, "fill", HOME, user="root")
    if done.exit_code != 0:
        raise TaskError(
            f"The family's files could not be copied into the machine: exit code {done.exit_code}.",
            details=last_lines(done.stderr.decode(errors="replace"), 2000),
        )


def complete(session: Session, environment: Environment, connection: Connection) -> None:
    """Gives a primary machine in which nothing of the family has run the files that its image lacks.

    Raises:
        TaskError: the machine did not take them.
    """
    if archive := session.images.added_files(environment.machines["primary"].image):
        unpack(connection, archive)
