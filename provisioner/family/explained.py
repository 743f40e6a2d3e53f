"""Names, in errors about a family, the section of the documentation that says what is allowed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from provisioner.errors import TaskFamilyError

_PAGE = "docs/reference/task-families.md"
FILES = f"{_PAGE}#files"
MANIFEST = f"{_PAGE}#manifest"
METHODS = f"{_PAGE}#methods"
BUILD_STEPS = f"{_PAGE}#build-steps"
VMSPEC = f"{_PAGE}#vmspec"


@contextmanager
def explained(section: str) -> Iterator[None]:
    """Adds a hint that names a section of the documentation to each TaskFamilyError that has no hint.

    Args:
        section: a page and its heading, such as MANIFEST.

    Raises:
        TaskFamilyError: the body's own.
    """
    try:
        yield
    except TaskFamilyError as error:
        error.hint = error.hint or f"{section} says what is allowed."
        raise
