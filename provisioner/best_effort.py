"""Runs what may fail without harm, such as keeping logs: its failure never prevents a destruction or another ending.

An error there, whatever it is, becomes one bounded line for the operator. Only KeyboardInterrupt passes: during a
clean-up it means that the operator insists on leaving at once.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from provisioner.errors import ProvisionerError
from provisioner.printable import beginning
from provisioner.progress import Progress

LINE_CHARACTERS = 300
# What does not stop a destruction: everything but KeyboardInterrupt.
SURVIVABLE = (Exception, SystemExit, GeneratorExit)


@contextlib.contextmanager
def best_effort(progress: Progress, what: str) -> Iterator[None]:
    """Runs the body, and reports an error in it instead of raising it.

    Args:
        what: what the body does, for the note.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        _note(progress, what, error)


def best_effort_within(progress: Progress, what: str, limit_seconds: float, work: Callable[[], object]) -> None:
    """Does some work in a thread of its own; continues without it after an error, or when its time is up.

    Args:
        what: what the work is, for the note.
        limit_seconds: how long it may take. After that, the thread runs until its own time limits end it.
    """
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    with best_effort(progress, what):
        thread = threading.Thread(target=run, name=what, daemon=True)
        thread.start()
        thread.join(limit_seconds)
        if thread.is_alive():
            raise TimeoutError(f"it did not end within {limit_seconds:g} seconds")
        for error in errors:
            _note(progress, what, error)


def describe(error: BaseException) -> str:
    """Returns one bounded line about an error; never raises."""
    try:
        if isinstance(error, KeyboardInterrupt):
            number = error.args[0] if error.args else "SIGINT"
            return "interrupted by Ctrl-C" if number == "SIGINT" else f"ended by {beginning(str(number), 20)}"
        said = error.message if isinstance(error, ProvisionerError) else f"{type(error).__name__} {error}"
        return beginning(" ".join(said.split()), LINE_CHARACTERS)
    except Exception:
        return type(error).__name__


def _note(progress: Progress, what: str, error: BaseException) -> None:
    with contextlib.suppress(Exception):
        progress.note(f"{what}: {describe(error)}")
