"""Has the epochs of a sample start from one frozen environment, where the configuration says `fork: epochs`.

The epoch that comes up first is frozen at the end of its `sample_init`; the others wait for that, and are copies of it.
Inspect's hooks say how many epochs there are, and when one is over. They are registered once a configuration asks for
this, and not when this module is imported: Inspect names each hook that it finds at its start to its user.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import cache, partial

import anyio
from inspect_ai.hooks import Hooks, SampleEnd, TaskEnd, TaskStart, hooks
from inspect_ai.util import SandboxEnvironment

from provisioner.best_effort import describe
from provisioner.environment import snapshots
from provisioner.errors import CapacityError, UsageError
from provisioner.inspect.blocking import end, launch
from provisioner.inspect.bring_up import bring_up
from provisioner.inspect.origin import Origin
from provisioner.inspect.sample import SampleMachines
from provisioner.session import Session

Services = dict[str, SandboxEnvironment]

_log = logging.getLogger("provisioner.inspect")


@dataclass(eq=False)
class _Fork:
    """The epochs of one sample in one configuration.

    Args:
        eval_id, sample_id: which sample.
        first: held by the epoch that comes up first, until it is frozen.
        snapshot: the name of the frozen environment; empty while there is none.
        services: what was started in it.
        session: of the epoch that was frozen.
        over: the epochs that Inspect has finished.
    """

    eval_id: str
    sample_id: str | int
    first: anyio.Lock = field(default_factory=anyio.Lock)
    snapshot: str = ""
    services: Services = field(default_factory=dict)
    session: Session | None = None
    over: set[int] = field(default_factory=set)


# By eval, sample, and all that makes the sample's machines. Only the event loop's thread adds and removes.
_forks: dict[tuple[str, str | int, str], _Fork] = {}
# The number of epochs of each eval that runs.
_epochs: dict[str, int] = {}


class EpochHooks(Hooks):
    """Learns from Inspect how many epochs an eval has, and removes snapshots that no epoch needs any more."""

    async def on_task_start(self, data: TaskStart) -> None:
        """Keeps the number of epochs."""
        _epochs[data.eval_id] = data.spec.config.epochs or 1

    async def on_sample_end(self, data: SampleEnd) -> None:
        """Counts an epoch that Inspect has finished: its sandboxes are cleaned up, and it is not tried again."""
        for fork in _forks_of(data.eval_id):
            if fork.sample_id == data.sample.id:
                fork.over.add(data.sample.epoch)
                if _is_over(fork):
                    await _remove(fork)

    async def on_task_end(self, data: TaskEnd) -> None:
        """Removes the snapshots of the eval."""
        for fork in _forks_of(data.eval_id):
            await _remove(fork)
        _epochs.pop(data.eval_id, None)


@cache
def watch() -> None:
    """Registers the hooks. To be called for each configuration that forks epochs, before its eval starts."""
    hooks(name="epochs", description="starts the epochs of a sample from one frozen environment")(EpochHooks)


async def bring_up_epoch(
    machines: SampleMachines,
    origin: Origin,
    sample_id: str | int | None,
    start: Callable[[SampleMachines], Awaitable[Services]],
) -> Services:
    """Brings up the machines of an epoch: anew, or as a copy of the sample's epoch that came up first.

    Args:
        origin: which eval it is.
        sample_id: Inspect's id of the sample.
        start: starts the services in machines that came up anew, before they are frozen.

    Returns:
        the services that were started in these machines, or in those that they are a copy of.

    Raises:
        ProvisionerError: it failed. If it was to be frozen, the next epoch comes up anew and is frozen instead.
    """
    fork = _fork_of(machines, origin, sample_id)
    if fork is None:
        await bring_up(machines)
        return await start(machines)
    if not fork.snapshot:
        machines.session.progress.phase_started("waiting for the sample's first epoch")
        async with fork.first:
            if not fork.snapshot:
                await bring_up(machines)
                fork.services = await start(machines)
                await launch(partial(_freeze, fork, machines), machines.cancelled)
                return fork.services
    machines.snapshot = fork.snapshot
    await bring_up(machines)
    return fork.services


def _fork_of(machines: SampleMachines, origin: Origin, sample_id: str | int | None) -> _Fork | None:
    """Returns the sample's epochs; None if this one comes up anew and is not frozen."""
    if machines.configuration.fork == "none":
        return None
    if not origin.eval_id or sample_id is None:
        machines.session.progress.note("Inspect does not say which sample this is. Its epoch comes up anew: no fork.")
        return None
    if _epochs.get(origin.eval_id) == 1:
        return None
    # Of a compose file, the configuration may hold the path alone.
    key = (origin.eval_id, sample_id, f"{machines.configuration.model_dump_json()} {machines.project}")
    fork = _forks.setdefault(key, _Fork(origin.eval_id, sample_id))
    return None if _is_over(fork) else fork  # Inspect may run an epoch again later, at its user's request


def _is_over(fork: _Fork) -> bool:
    """Returns whether all epochs are over; False if Inspect has not said how many there are."""
    return len(fork.over) >= _epochs.get(fork.eval_id, len(fork.over) + 1)


def _freeze(fork: _Fork, machines: SampleMachines) -> None:
    """Freezes machines. Others start from them even if this epoch was cancelled meanwhile.

    A host without room for a snapshot fails no epoch: the next one comes up anew, and tries again.
    """
    try:
        name = machines.freeze()
    except CapacityError as error:
        _log.warning("The epochs of sample %s come up anew for now. %s", fork.sample_id, describe(error))
        return
    fork.session, fork.snapshot = machines.session, name


def _forks_of(eval_id: str) -> list[_Fork]:
    return [fork for fork in _forks.values() if fork.eval_id == eval_id]


async def _remove(fork: _Fork) -> None:
    """Removes the snapshot, if there is one. Raises nothing: the end of the run tries again, and then a sweep."""
    if not fork.snapshot or not fork.session:
        return
    try:
        await end(partial(snapshots.remove, fork.session, fork.snapshot))
    except UsageError:
        return  # a copy of it could not be destroyed, or is to stay
    except Exception as error:
        _log.error("The snapshot %s could not be removed: %s", fork.snapshot, describe(error))
        return
    fork.snapshot = ""


async def end_all() -> None:
    """Removes the snapshots of all evals. Leaves those of which copies still exist to the sweep."""
    for fork in list(_forks.values()):
        await _remove(fork)
        if fork.snapshot and fork.session:
            snapshots.leave(fork.session, fork.snapshot)
    _forks.clear()
    _epochs.clear()
