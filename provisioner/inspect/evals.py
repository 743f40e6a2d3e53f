"""Knows the evals and samples that run: their directories, limits and configuration files.

Has the only imports of names that Inspect does not publish. Without one of them, the provider still works:

| name | why | without it |
| --- | --- | --- |
| sample_active | nothing public tells `sample_init` the eval, the epoch and the limits | 4 hours to live, no forks |
| registry_add | Inspect logs the arguments of the registered function, before that can change them | paths as given |
| PrerequisiteError | what Inspect prints without a traceback | a traceback |
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inspect_ai import Task
from inspect_ai.hooks import Hooks, TaskEnd, TaskStart, hooks
from inspect_ai.util import SandboxEnvironmentConfigType, registry_info

from provisioner.base.clock import DEFAULT_TTL, MAX_TTL, checked_ttl, format_duration, parse_duration
from provisioner.inspect.compose import is_compose
from provisioner.inspect.configuration import VARIABLE, Configuration, file_beside

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


# Beyond the sample's own time: images, boot and start before it, scoring after it.
AROUND_TIME_LIMIT = timedelta(hours=1)
# What a configured time to live must leave for boot, start and the first score, which no limit of Inspect's counts.
START = timedelta(minutes=15)
# How an eval's batch is named, by which `costs --by batch` shows it and a clean-up finds it.
BATCH_PREFIX = "inspect-"


@dataclass(frozen=True)
class Origin:
    """Identifies a sample: its eval, its Inspect task, and its limits.

    Args:
        task: Inspect's task.
        eval_id: Inspect's id of the eval.
        sample: the sample's id and epoch.
        time_limit_seconds: the sample's time limit; None for none.
        working_limit_seconds: its working limit, which does not count waits for the model; None for none.
    """

    task: str
    eval_id: str = ""
    sample: str = ""
    time_limit_seconds: float | None = None
    working_limit_seconds: float | None = None

    @property
    def batch(self) -> str:
        """The name under which the sample's costs count, or those of images that are built before an eval begins."""
        return f"{BATCH_PREFIX}{self.eval_id or 'images'}"


def time_to_live(configuration: Configuration, origin: Origin, note: Callable[[str], None]) -> timedelta:
    """Returns how long a sample's machines may live: as configured, or by the sample's limits.

    A working limit alone does not say when a sample ends, as waits for the model do not count.

    Raises:
        UsageError: the configured one is not valid.
    """
    limit = timedelta(seconds=origin.time_limit_seconds or 0)
    work = timedelta(seconds=origin.working_limit_seconds or 0)
    longest = (limit or work) * 1.5
    if configuration.ttl:
        ttl = checked_ttl(parse_duration(configuration.ttl))
        needed = longest + START if longest else timedelta()
    else:
        needed = longest + AROUND_TIME_LIMIT if longest else DEFAULT_TTL
        if not limit:
            needed = max(needed, DEFAULT_TTL)
        ttl = min(needed, MAX_TTL)
    if ttl < needed:
        advice = f"Set `ttl` to at least {format_duration(needed)} (at most {format_duration(MAX_TTL)})."
        if needed > MAX_TTL:
            advice = f"Give the sample a shorter limit: `ttl` can be at most {format_duration(MAX_TTL)}."
        note(
            f"The machines' time to live ({format_duration(ttl)}) may end before the sample does: its limit is "
            f"{format_duration(limit or work)}. {advice}"
        )
    return ttl


_log = logging.getLogger("provisioner.inspect")

# The directory of each eval that runs, by its id.
directories: dict[str, Path] = {}
# The configuration files that samples of this process have used.
_used: set[str] = set()


class EvalHooks(Hooks):
    """Keeps each eval's directory, and looks once whether its samples use the eval's own configuration file."""

    async def on_task_start(self, data: TaskStart) -> None:
        """Comes after the images of all samples are built, and before the first sample."""
        file, sandbox = data.spec.task_file, data.spec.sandbox
        directory = Path(file).absolute().parent if file else Path.cwd()
        directories[data.eval_id] = directory
        if sandbox is None or sandbox.type != "provisioner" or not isinstance(sandbox.config, str):
            return
        path = directory / sandbox.config
        count = len(data.spec.dataset.sample_ids or ())
        if count and not is_compose(str(path)) and os.path.realpath(path) not in _used:
            _log.warning(
                "%s is not used: all %d samples of %s name a configuration of their own, and what it says of budget, "
                "cloud or internet does not count. Settings for all samples: %s=FILE.",
                path, count, data.spec.task, VARIABLE,
            )  # fmt: skip

    async def on_task_end(self, data: TaskEnd) -> None:
        """Forgets the eval."""
        directories.pop(data.eval_id, None)


@cache
def _watch() -> None:
    """Registers the hooks: once a sample uses the sandbox, as Inspect names to its user what is there at its start."""
    hooks(name="evals", description="finds the configuration files of evals")(EvalHooks)


def use(config: SandboxEnvironmentConfigType | None) -> None:
    """Notes that a sample uses a configuration. To be called in the eval's directory, before its first sample."""
    _watch()
    paths = (config if isinstance(config, str) else None, file_beside(config))
    _used.update(os.path.realpath(path) for path in paths if path)
