"""The options that name a submission: as text, on standard input or in a file.

Arguments show in the host's process list, which every user of the host may read. Input and files do not.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from provisioner.cli.options import parse_path, parse_text
from provisioner.environment.operations import SUBMISSION_LIMIT_BYTES
from provisioner.errors import UsageError

STANDARD_INPUT = "-"

SubmissionOption = Annotated[
    str | None,
    typer.Option(
        "--submission",
        metavar="TEXT",
        help="Text to score instead of the submission file; - for standard input.",
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


def read_submission(text: str | None, file: Path | None) -> str | None:
    """Returns the submission that the options name; None if they name none.

    Raises:
        UsageError: both name one, or it cannot be read, is too long, or is not UTF-8.
    """
    if text is not None and file is not None:
        raise UsageError("Use either --submission or --submission-file.")
    if text == STANDARD_INPUT:
        return _read(sys.stdin.buffer, "standard input")
    if file is None:
        return text
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
