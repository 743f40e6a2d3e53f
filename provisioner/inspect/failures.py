"""Has Inspect's logs say all that we know of a failure, in the words of Inspect's users.

The logs keep an error's text, and none of its other fields.
"""

from __future__ import annotations

import re
import secrets
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.markup import escape

from provisioner.clock import now
from provisioner.errors import (
    ImageBuildError,
    Interrupted,
    MissingVariablesError,
    ProvisionerError,
    TaskError,
)
from provisioner.inspect.private import PrerequisiteError
from provisioner.printable import beginning, first_and_last_lines, printable, printable_lines
from provisioner.redaction import Redactor
from provisioner.store.files import write_atomically
from provisioner.store.home import Home

# Commands that a message names are the reader's to run as they are.
_COMMAND = re.compile(r"(`provisioner [^`]*`)")
# The first that fits counts: the longer ones stand before what they contain.
_WORDS = (
    ("--region, --profile, --spot and --state", "`region` and `spot`"),
    ("--cloud aws", "`cloud: aws` (in provisioner.yaml, or -T cloud=aws)"),
    ("--cloud", "`cloud` (in provisioner.yaml, or -T cloud=CLOUD)"),
    ("Give --region (in a suite: regions), or set AWS_REGION", "Give `region` in provisioner.yaml, or set AWS_REGION"),
    ("--region", "`region` (in provisioner.yaml, or set AWS_REGION)"),
    ("--spot", "`spot` of provisioner.yaml"),
    ("--ttl", "`ttl` (in provisioner.yaml, or -T ttl=TTL)"),
    ("--budget", "`budget` (in provisioner.yaml, or -T budget=USD)"),
    ("--env-file", "`env_file` (in provisioner.yaml, or -T secrets_env_path=FILE)"),
    ("--allow", "`allow` in provisioner.yaml"),
    ("Share its Terraform state (--state s3://bucket/prefix), or let", "Let"),
    (
        "a task that needs it must ask for the permission full_internet",
        "machines that need it have `internet: full`, and a family's task the permission full_internet",
    ),
)
# A longer option that begins so is another one.
_OPTION = re.compile("|".join(rf"{re.escape(words)}(?![\w-])" for words, _ in _WORDS))
_REPLACED = dict(_WORDS)


def for_inspect(text: str) -> str:
    """Returns a message, or a hint, that names keys and arguments in the place of options. Safe to repeat."""
    parts = _COMMAND.split(text)
    parts[::2] = [_OPTION.sub(lambda found: _REPLACED[found[0]], part) for part in parts[::2]]
    return "".join(parts)


# Of a program's output or a traceback: in a sample's transcript, and where Inspect shows an error.
FIRST_LINES, LAST_LINES = 20, 60
FIRST_SHOWN, LAST_SHOWN = 3, 12
MOST_CHARACTERS = 16_000
# Of the file with all of it.
MOST_KEPT_CHARACTERS = 1 << 20


SECRETS_HINT = (
    "Write them as NAME=value lines into a file, and name it: -T secrets_env_path=FILE for a task of provisioner's, or "
    "env_file in the sandbox's configuration."
)


class _Text(str):
    """Text that stands in logs as it is, and escaped where Inspect prints it: as part of a text with rich's markup."""

    __slots__ = ()

    def __format__(self, form: str) -> str:
        return format(escape(str(self)), form)


class PreparationError(ProvisionerError, PrerequisiteError):
    """An eval cannot begin. Inspect prints its message alone, without a traceback, and ends.

    Args:
        text: what is said, as it stands: Inspect would take `[...]` in a message for rich's markup.
    """

    message: str

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.message = _Text(text)


@contextmanager
def before_samples() -> Iterator[None]:
    """Has Inspect print an error as what it is. To be used before the first sample, whose errors Inspect logs.

    Raises:
        PreparationError: the body raised a ProvisionerError, or this host refuses a file or directory.
    """
    try:
        yield
    except Interrupted:
        raise
    except ProvisionerError as error:
        said = (error.message, error.hint)
        raise PreparationError("\n".join(for_inspect(part) for part in said if part)) from None
    except OSError as error:
        if not error.filename:
            raise
        hint = "Look at the permissions and the disk there, or name another home: PROVISIONER_HOME=DIRECTORY."
        raise PreparationError(f"{printable(str(error.filename))}: {error.strerror}.\n{hint}") from None


@contextmanager
def told_in_full(redactor: Redactor | None = None) -> Iterator[None]:
    """Puts an error's details and hint into its text, without any secret, and raises the like of it.

    The text fits a screen. If the details do not, it names a file with all of it. Inspect shows a traceback of a
    sample's error, which begins here: where the error comes from is in the file, and no help to the operator.

    Args:
        redactor: of the task's secrets; None if there are none yet.

    Raises:
        ProvisionerError: the body raised it.
    """
    redactor = redactor or Redactor({})
    try:
        yield
    except Interrupted:
        raise
    except ProvisionerError as error:
        if isinstance(error, MissingVariablesError):  # which has the command line's option
            error.hint = SECRETS_HINT
        text = _on_a_screen(error, redactor)
        # Another object, without the traceback. Inspect's log has `message` as well as the text, and a cause's own.
        told = type(error).__new__(type(error), text)
        told.__dict__ |= error.__dict__ | {"message": text, "details": None, "hint": None}
        raise told from None


def _on_a_screen(error: ProvisionerError, redactor: Redactor) -> str:
    message, details, hint = _parts(error, redactor)
    shown = first_and_last_lines(details, FIRST_SHOWN, LAST_SHOWN)
    parts = [message, shown, hint]
    if shown != details:
        with suppress(OSError):
            origin = printable_lines(redactor.redact("".join(traceback.format_tb(error.__traceback__))))
            parts.append(f"All of it: {_kept(_joined(message, details, hint, origin))}")
    return beginning(_joined(*parts), MOST_CHARACTERS)


def _kept(text: str) -> Path:
    """Writes a text into a file of the home's archive, and returns its path."""
    home = Home.default()
    home.make()
    path = home.archive / f"inspect-{now():%Y%m%dT%H%M%S}-{secrets.token_hex(4)}.log"
    write_atomically(path, f"{beginning(text, MOST_KEPT_CHARACTERS)}\n".encode(errors="replace"))
    return path


def in_full(error: ProvisionerError, redactor: Redactor) -> str:
    """Returns an error's message, details and hint, redacted, bounded and safe for a terminal."""
    message, details, hint = _parts(error, redactor)
    text = _joined(message, first_and_last_lines(details, FIRST_LINES, LAST_LINES), hint)
    return beginning(text, MOST_CHARACTERS)


def _parts(error: ProvisionerError, redactor: Redactor) -> tuple[str, ...]:
    """Returns an error's message, details and hint, redacted and safe for a terminal; "" for what it lacks."""
    texts = (error.message, error.details, error.hint or "")
    if not isinstance(error, TaskError | ImageBuildError):  # whose words are the family's
        texts = (for_inspect(error.message), error.details, for_inspect(error.hint or ""))
    return tuple(printable_lines(redactor.redact(text or "").strip()) for text in texts)


def _joined(*parts: str) -> str:
    return "\n".join(part for part in parts if part)
