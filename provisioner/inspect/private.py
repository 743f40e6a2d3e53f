"""The only imports of names that Inspect does not publish. Each has a substitute: without it, the provider still works.

| name | why | without it |
| --- | --- | --- |
| sample_active | nothing public tells `sample_init` the eval, the epoch and the limits | 4 hours to live, no forks |
| registry_add | Inspect logs the arguments of the registered function, before that can change them | paths as given |
| PrerequisiteError | what Inspect prints without a traceback | a traceback |
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inspect_ai import Task
from inspect_ai.util import registry_info

from provisioner.inspect.origin import Origin

if TYPE_CHECKING:
    from inspect_ai._util.error import PrerequisiteError
    from inspect_ai._util.registry import registry_add
    from inspect_ai.log._samples import sample_active
else:
    try:
        from inspect_ai._util.error import PrerequisiteError
    except ImportError:

        class PrerequisiteError(Exception):
            """Takes the place of Inspect's."""

    try:
        from inspect_ai._util.registry import registry_add
    except ImportError:

        def registry_add(_registered: Callable[..., Any], _info: object) -> None:
            """Leaves the function registered that is."""

    try:
        from inspect_ai.log._samples import sample_active
    except ImportError:

        def sample_active() -> None:
            """Knows of no sample."""


__all__ = ["PrerequisiteError", "origin_of_sample", "registry_add"]


def origin_of_sample(task: str, sample_id: str | int | None) -> Origin:
    """Returns which sample is beginning.

    Args:
        task: Inspect's task.
        sample_id: the sample's id, as the metadata of `sample_init` has it; None if it has none.
    """
    sample = sample_active()
    if sample is None:
        return Origin(task, sample="" if sample_id is None else str(sample_id))
    identity = f"{sample.sample.id if sample_id is None else sample_id} (epoch {sample.epoch})"
    return Origin(task, sample.eval_id, identity, sample.time_limit, sample.working_limit)


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
