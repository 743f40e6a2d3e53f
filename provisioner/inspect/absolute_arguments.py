"""Has Inspect's log keep absolute paths among a task's arguments: an eval-retry makes the task of them elsewhere."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path

from inspect_ai import Task
from inspect_ai.util import registry_info

from provisioner.inspect.private import registry_add


def absolute(*names: str) -> Callable[[Callable[..., Task]], Callable[..., Task]]:
    """Returns a decorator of Inspect tasks that makes some of their arguments absolute paths before Inspect keeps them.

    Inspect keeps the arguments of the function that is registered, so this one takes its place.

    Args:
        names: of the arguments; those that are empty stay so.
    """

    def decorate(task: Callable[..., Task]) -> Callable[..., Task]:
        signature = inspect.signature(task)

        @functools.wraps(task)
        def with_absolute_paths(*args: object, **kwargs: object) -> Task:
            bound = signature.bind(*args, **kwargs)
            for name in names:
                if path := bound.arguments.get(name):
                    bound.arguments[name] = os.path.normpath(Path.cwd() / Path(str(path)).expanduser())
            return task(*bound.args, **bound.kwargs)

        registry_add(with_absolute_paths, registry_info(task))
        return with_absolute_paths

    return decorate
