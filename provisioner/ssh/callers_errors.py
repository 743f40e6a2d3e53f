"""Remembers exceptions of a caller's own functions, to tell them from what went wrong with a connection."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec

Arguments = ParamSpec("Arguments")


class CallersErrors:
    """Remembers exceptions from a caller's own functions, as some look like a broken connection: BrokenPipeError does.

    Attributes:
        raised: the last exception.
    """

    def __init__(self) -> None:
        self.raised: BaseException | None = None

    def watched(self, function: Callable[Arguments, None]) -> Callable[Arguments, None]:
        """Returns the function with its exceptions recorded."""

        def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
            try:
                function(*args, **kwargs)
            except BaseException as error:
                self.raised = error
                raise

        return call
