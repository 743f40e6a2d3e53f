"""Starts samples, or the epochs of each sample, from one frozen environment, where the configuration says `fork`.

The first to come up is frozen at the end of its `sample_init`, before Inspect gets its sandboxes. The others wait for
that, and are copies of it. What they share is all that the configuration makes, and nothing of a sample's own.
Inspect's hooks say how many samples and epochs there are, and when one is over. They are registered once a
configuration asks for this, and not when this module is imported: Inspect names each hook that it finds at its start.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache, partial
from typing import Literal

import anyio
import anyio.lowlevel
from inspect_ai.hooks import Hooks, SampleEnd, TaskEnd, TaskStart, hooks

from provisioner.base.clock import TEARDOWN, now
from provisioner.base.errors import BudgetError, CapacityError, ProvisionerError, ShortageError, UsageError
from provisioner.base.progress import describe
from provisioner.costs.ledger import LatestEnds
from provisioner.environment import snapshots
from provisioner.inspect.blocking import end, launch, look
from provisioner.inspect.evals import Origin
from provisioner.inspect.sample import SampleMachines
from provisioner.session import Session

PAUSE_SECONDS = 5.0


# The samples of this process that are coming up: their machines have not taken their memory yet.
_launches: list[SampleMachines] = []
_looking: anyio.lowlevel.RunVar[anyio.Lock] = anyio.lowlevel.RunVar("provisioner_looking")


async def bring_up(machines: SampleMachines) -> None:
    """Brings the machines up, proven isolated. Waits for the budget or the memory that others have.

    Raises:
        ProvisionerError: it failed; everything that was created has been destroyed.
    """
    told = False
    while error := await _refusal(machines):
        if not told:
            machines.session.progress.note(f"{error.message} Waiting until others have ended.")
        told = True
        await anyio.sleep(PAUSE_SECONDS)


async def _refusal(machines: SampleMachines) -> ProvisionerError | None:
    """Tries once. Returns what is short as long as others run, whose end may help."""
    lock = _looking.get(anyio.Lock())
    _looking.set(lock)
    async with lock:  # two that look at once would both find the same room
        others = await look(partial(_others, machines))
        is_alone = not _launches and not _may_help(others.on_cloud)
        if not is_alone and (shortage := await look(partial(machines.shortage, 1 + len(_launches)))):
            return ShortageError(f"The machines do not fit now: {shortage}.")
        _launches.append(machines)
    try:
        await launch(machines.bring_up, machines.cancelled)
    except (BudgetError, ShortageError) as error:
        if isinstance(error, BudgetError) and not error.may_fit_later:
            raise
        # If the last of the others has ended in the meantime, its part is free now.
        looks = (others, await look(partial(_others, machines)))
        if not any(_may_help(each.paid if isinstance(error, BudgetError) else each.on_cloud) for each in looks):
            raise
        return error
    finally:
        _launches.remove(machines)
    return None


def _others(machines: SampleMachines) -> LatestEnds:
    return machines.session.ledger.latest_ends(machines.session.cloud.name)


def _may_help(last_end: datetime | None) -> bool:
    """Returns whether other environments run that a process will settle: their reservation and memory are free then."""
    return last_end is not None and last_end > now() - TEARDOWN


Place = Literal["alone", "first", "copy"]

_log = logging.getLogger("provisioner.inspect")


@dataclass(eq=False)
class Fork:
    """What starts from one environment: samples of one configuration, or the epochs of one of them.

    Args:
        eval_id: which eval.
        sample_id: whose epochs; None for all samples.
        first: held by the sample that comes up first, until it is frozen.
        snapshot: the name of the frozen environment; empty while there is none.
        session: of the sample that was frozen.
        over: the epochs of the sample that Inspect has finished.
    """

    eval_id: str
    sample_id: str | int | None
    first: anyio.Lock = field(default_factory=anyio.Lock)
    snapshot: str = ""
    session: Session | None = None
    over: set[int] = field(default_factory=set)


# By eval, sample, and all that makes the sample's machines. Only the event loop's thread adds and removes.
_forks: dict[tuple[str, str | int | None, str], Fork] = {}
# Of each eval that runs, how many may start from one environment, by the value of `fork`.
_most: dict[str, dict[str, int]] = {}


class ForkHooks(Hooks):
    """Learns from Inspect how many samples and epochs an eval has, and removes snapshots that none needs any more."""

    async def on_task_start(self, data: TaskStart) -> None:
        """Keeps the numbers of samples and epochs."""
        epochs = data.spec.config.epochs or 1
        _most[data.eval_id] = {"epochs": epochs, "samples": epochs * len(data.spec.dataset.sample_ids or ())}

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
        _most.pop(data.eval_id, None)


@cache
def watch() -> None:
    """Registers the hooks. To be called for each configuration that forks, before its eval starts."""
    hooks(name="forks", description="starts samples or epochs from one frozen environment")(ForkHooks)


@contextlib.asynccontextmanager
async def place_in(fork: Fork | None, machines: SampleMachines) -> AsyncIterator[Place]:
    """Waits until a sample may come up, and returns as what: the first of its fork, a copy of that, or on its own.

    If the body fails for the first, the next sample comes up anew and is frozen instead.
    """
    if fork and not fork.snapshot:
        machines.session.progress.phase_started("waiting for the environment that this sample is a copy of")
        async with fork.first:
            if not fork.snapshot:
                yield "first"
                return
    if fork:
        machines.snapshot = fork.snapshot
    yield "copy" if fork else "alone"


def fork_of(machines: SampleMachines, origin: Origin, sample_id: str | int | None) -> Fork | None:
    """Returns what the sample starts together with; None if it comes up anew and is not frozen."""
    fork = machines.configuration.fork
    if fork == "none" or _most.get(origin.eval_id, {}).get(fork) == 1:
        return None
    if not origin.eval_id or sample_id is None:
        machines.session.progress.note("Inspect does not say which sample this is. It comes up anew: no fork.")
        return None
    whose = sample_id if fork == "epochs" else None
    # Of a compose file, the configuration may hold the path alone.
    key = (origin.eval_id, whose, f"{machines.configuration.model_dump_json()} {machines.project}")
    found = _forks.setdefault(key, Fork(origin.eval_id, whose))
    return None if _is_over(found) else found  # Inspect may run an epoch again later, at its user's request


def _is_over(fork: Fork) -> bool:
    """Returns whether all epochs of a sample are over; False if Inspect has not said how many there are."""
    return len(fork.over) >= _most.get(fork.eval_id, {}).get("epochs", len(fork.over) + 1)


def freeze(fork: Fork, machines: SampleMachines) -> None:
    """Freezes machines. Others start from them even if this sample was cancelled meanwhile.

    A host without room for a snapshot fails no sample: the next one comes up anew, and tries again.
    """
    try:
        name = machines.freeze()
    except CapacityError as error:
        _log.warning("%s comes up anew, and so does the next for now. %s", machines.session.label, describe(error))
        return
    fork.session, fork.snapshot = machines.session, name


def _forks_of(eval_id: str) -> list[Fork]:
    return [fork for fork in _forks.values() if fork.eval_id == eval_id]


async def _remove(fork: Fork) -> None:
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
    _most.clear()
