"""The options that name a submission: on standard input or in a file.

Never as text: arguments show in the host's process list, which every user of the host may read.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from provisioner.base.errors import UsageError
from provisioner.cli.options import parse_path, parse_text
from provisioner.environment.operations import SUBMISSION_LIMIT_BYTES

STANDARD_INPUT = "-"

SubmissionOption = Annotated[
    str | None,
    typer.Option(
        "--submission",
        metavar=STANDARD_INPUT,
        help="Score standard input instead of the submission file.",
        show_default=False,
        parser=parse_text,
    ),
]
SubmissionFileOption = Annotated[
    Path | None,
    typer.Option(
        "--submission-file",
        metavar="FILE",
        help="File on this host to score instead of the submission file.",
        show_default=False,
        parser=parse_path,
    ),
]


def read_submission(source: str | None, file: Path | None) -> str | None:
    """Returns the submission that the options name; None if they name none.

    Args:
        source: the value of --submission.
        file: that of --submission-file.

    Raises:
        UsageError: both name one, --submission names anything but standard input, or it cannot be read, is too long,
            or is not UTF-8.
    """
    if source is not None and file is not None:
        raise UsageError("Use either --submission or --submission-file.")
    if source == STANDARD_INPUT:
        return _read(sys.stdin.buffer, "standard input")
    if source is not None:
        raise UsageError(
            "The submission cannot be an argument: every user of this host could read it in the process list.",
            hint="Use --submission-file FILE, or --submission - for standard input.",
        )
    if file is None:
        return None
    try:
        with file.open("rb") as opened:
            return _read(opened, str(file))
    except OSError as error:
        raise UsageError(f"The submission {file} cannot be read: {error.strerror}.") from error


def _read(source: BinaryIO, name: str) -> str:
    data = source.read(SUBMISSION_LIMIT_BYTES + 1)
    if len(data) > SUBMISSION_LIMIT_BYTES:
        raise UsageError(f"The submission in {name} is longer than {SUBMISSION_LIMIT_BYTES >> 20} MiB.")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"The submission in {name} is not UTF-8.") from error
