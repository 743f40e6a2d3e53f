"""Keeps each eval's directory, by Inspect's hooks, and warns of a configuration that none of its samples uses.

Inspect takes a sample's own configuration in the place of the eval's, and drops the eval's without a word.
"""

from __future__ import annotations

import logging
import os
from functools import cache
from pathlib import Path

from inspect_ai.hooks import Hooks, TaskEnd, TaskStart, hooks
from inspect_ai.util import SandboxEnvironmentConfigType

from provisioner.inspect.compose import is_compose
from provisioner.inspect.configuration import VARIABLE, file_beside

_log = logging.getLogger("provisioner.inspect")

# The directory of each eval that runs, by its id.
_directories: dict[str, Path] = {}
# The configuration files that samples of this process have used.
_used: set[str] = set()


class EvalHooks(Hooks):
    """Keeps each eval's directory, and looks once whether its samples use the eval's own configuration file."""

    async def on_task_start(self, data: TaskStart) -> None:
        """Comes after the images of all samples are built, and before the first sample."""
        file, sandbox = data.spec.task_file, data.spec.sandbox
        directory = Path(file).absolute().parent if file else Path.cwd()
        _directories[data.eval_id] = directory
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
        _directories.pop(data.eval_id, None)


@cache
def _watch() -> None:
    """Registers the hooks: once a sample uses the sandbox, as Inspect names to its user what is there at its start."""
    hooks(name="evals", description="finds the configuration files of evals")(EvalHooks)


def use(config: SandboxEnvironmentConfigType | None) -> None:
    """Notes that a sample uses a configuration. To be called in the eval's directory, before its first sample."""
    _watch()
    paths = (config if isinstance(config, str) else None, file_beside(config))
    _used.update(os.path.realpath(path) for path in paths if path)


def directory_of(eval_id: str) -> Path | None:
    """Returns an eval's directory; None if Inspect has not said it."""
    return _directories.get(eval_id)
