"""Has Inspect's logs say all that we know of a failure: they keep an error's text, and none of its other fields."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.markup import escape

from provisioner.errors import (
    ImageBuildError,
    Interrupted,
    MissingVariablesError,
    ProvisionerError,
    TaskError,
    UsageError,
)
from provisioner.inspect.private import PrerequisiteError
from provisioner.inspect.wording import for_inspect
from provisioner.printable import beginning, first_and_last_lines, printable_lines
from provisioner.redaction import Redactor

# Of a program's output or a traceback.
FIRST_LINES, LAST_LINES = 20, 60
MOST_CHARACTERS = 16_000


SECRETS_HINT = (
    "Write them as NAME=value lines into a file, and name it: -T secrets_env_path=FILE for a task of provisioner's, or "
    "env_file in the sandbox's configuration."
)


class _Text(str):
    """Text that stands in logs as it is, and escaped where Inspect prints it: as part of a text with rich's markup."""

    __slots__ = ()

    def __format__(self, form: str) -> str:
        return format(escape(str(self)), form)


class BadInputError(UsageError, PrerequisiteError):
    """What an eval was given is not valid. Inspect prints its message alone, without a traceback, and ends.

    Args:
        text: what is said, as it stands: Inspect would take `[...]` in a message for rich's markup.
    """

    message: str

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.message = _Text(text)


@contextmanager
def before_samples() -> Iterator[None]:
    """Has Inspect print bad input as what it is. To be used before the first sample, whose errors Inspect logs.

    Raises:
        BadInputError: the body raised a UsageError.
    """
    try:
        yield
    except UsageError as error:
        said = (error.message, error.hint)
        raise BadInputError("\n".join(for_inspect(part) for part in said if part)) from None


@contextmanager
def told_in_full(redactor: Redactor | None = None) -> Iterator[None]:
    """Puts an error's details and hint into its text, without any secret, and raises it again.

    Args:
        redactor: of the task's secrets; None if there are none yet.

    Raises:
        ProvisionerError: the body raised it.
    """
    try:
        yield
    except Interrupted:
        raise
    except ProvisionerError as error:
        if isinstance(error, MissingVariablesError):  # which has the command line's option
            error.hint = SECRETS_HINT
        text = in_full(error, redactor or Redactor({}))
        # Inspect's log has `message` as well as the text, and a cause with its own.
        error.args, error.message = (text,), text
        error.details = error.hint = None
        raise error from None


def in_full(error: ProvisionerError, redactor: Redactor) -> str:
    """Returns an error's message, details and hint, redacted, bounded and safe for a terminal."""
    texts = (error.message, error.details, error.hint or "")
    if not isinstance(error, TaskError | ImageBuildError):  # whose words are the family's
        texts = (for_inspect(error.message), error.details, for_inspect(error.hint or ""))
    message, details, hint = (printable_lines(redactor.redact(text or "").strip()) for text in texts)
    parts = [message, first_and_last_lines(details, FIRST_LINES, LAST_LINES) if details else "", hint]
    return beginning("\n".join(part for part in parts if part), MOST_CHARACTERS)
