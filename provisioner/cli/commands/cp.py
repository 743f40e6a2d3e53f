"""The command `cp`: copies files to and from a machine."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Annotated

import typer

from provisioner.base.errors import UsageError
from provisioner.cli.options import MachineOption, UserOption, machine_and_user
from provisioner.cli.output import Result
from provisioner.cli.sessions import environment_session
from provisioner.copying import transfer
from provisioner.machines.connect import connect_kept

SHOWN_PATHS = 10


def main(
    source: Annotated[str, typer.Argument(metavar="FROM", help="PATH or ENV:PATH.")],
    destination: Annotated[str, typer.Argument(metavar="TO", help="PATH or ENV:PATH.")],
    machine: MachineOption = "primary",
    user: UserOption = None,
) -> Result:
    """Copies into or out of a machine. `ENV:` alone as the destination means the user's home."""
    if not source or not destination:
        raise UsageError("FROM and TO must not be empty.")
    from_machine, to_machine = _is_remote(source), _is_remote(destination)
    if from_machine == to_machine:
        raise UsageError("Exactly one of the two paths must have the form ENV:PATH.")
    name, _, remote = (source if from_machine else destination).partition(":")
    if from_machine and PurePosixPath(remote).name in ("", ".."):
        raise UsageError("The path in the machine must end with the name of a file or directory.")
    opened, environment = environment_session(name)
    role, chosen = machine_and_user(environment, machine, user)
    with connect_kept(opened, environment, role) as connection:
        if from_machine:
            downloaded = transfer.download(connection, remote, Path(destination), chosen)
        else:
            downloaded = transfer.Downloaded(transfer.upload(connection, Path(source), remote or ".", chosen), (), 0)
    data = {
        "environment": environment.id,
        "files": downloaded.files,
        "skipped": list(downloaded.skipped),
        "skipped_count": downloaded.skipped_count,
    }
    return Result(data, "\n".join([f"{downloaded.files} files copied", *_skipped(downloaded)]))


def _skipped(downloaded: transfer.Downloaded) -> list[str]:
    """Lists the paths that were not copied, on at most one screen."""
    count = downloaded.skipped_count
    if not count:
        return []
    more = [f"  and {count - SHOWN_PATHS} more"] if count > SHOWN_PATHS else []
    named = [f"  {path}" for path in downloaded.skipped[:SHOWN_PATHS]]
    return [f"{count} links, special files and names with control characters skipped:", *named, *more]


def _is_remote(path: str) -> bool:
    name, colon, _ = path.partition(":")
    return bool(colon) and "/" not in name
