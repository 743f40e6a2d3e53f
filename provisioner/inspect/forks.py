"""Starts samples, or the epochs of each sample, from one frozen environment, where the configuration says `fork`.

The first to come up is frozen at the end of its `sample_init`, before Inspect gets its sandboxes. The others wait for
that, and are copies of it. What they share is all that the configuration makes, and nothing of a sample's own.
Inspect's hooks say how many samples and epochs there are, and when one is over. They are registered once a
configuration asks for this, and not when this module is imported: Inspect names each hook that it finds at its start.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache, partial

import anyio
import anyio.lowlevel
from inspect_ai.hooks import Hooks, SampleEnd, TaskEnd, TaskStart, hooks
from inspect_ai.util import SandboxEnvironment

from provisioner.best_effort import describe
from provisioner.clock import now
from provisioner.costs.ledger import LatestEnds
from provisioner.environment import snapshots
from provisioner.errors import BudgetError, CapacityError, ProvisionerError, ShortageError, UsageError
from provisioner.inspect.blocking import end, launch
from provisioner.inspect.failures import for_inspect
from provisioner.inspect.origin import Origin
from provisioner.inspect.sample import SampleMachines
from provisioner.session import Session
from provisioner.ttl import TEARDOWN

PAUSE_SECONDS = 5.0


class _Launches:
    """Counts the samples of this process that are coming up: their machines have not taken their memory yet."""

    def __init__(self) -> None:
        self.count = 0

    @contextlib.contextmanager
    def one_more(self) -> Iterator[None]:
        self.count += 1
        try:
            yield
        finally:
            self.count -= 1


_launches = _Launches()
_turns: anyio.lowlevel.RunVar[anyio.Lock] = anyio.lowlevel.RunVar("provisioner_turns")


async def bring_up(machines: SampleMachines) -> None:
    """Brings the machines up, proven isolated. Waits for the budget or the memory that others have.

    Raises:
        ProvisionerError: it failed; everything that was created has been destroyed.
    """
    told = False
    while error := await _refusal(machines):
        if not told:
            machines.session.progress.note(f"{for_inspect(error.message)} Waiting until others have ended.")
        told = True
        await anyio.sleep(PAUSE_SECONDS)


async def _refusal(machines: SampleMachines) -> ProvisionerError | None:
    """Tries once. Returns what is short as long as others run, whose end may help."""
    with contextlib.ExitStack() as launching:
        async with _turn():  # two that look at once would both find the same room
            others = await end(partial(_others, machines))
            is_alone = not _launches.count and not _may_help(others.on_cloud)
            if not is_alone and (shortage := await end(partial(machines.shortage, 1 + _launches.count))):
                return ShortageError(f"The machines do not fit now: {shortage}.")
            launching.enter_context(_launches.one_more())
        try:
            await launch(machines.bring_up, machines.cancelled)
        except (BudgetError, ShortageError) as error:
            if isinstance(error, BudgetError) and not error.may_fit_later:
                raise
            # If the last of the others has ended in the meantime, its part is free now.
            looks = (others, await end(partial(_others, machines)))
            if not any(_may_help(look.paid if isinstance(error, BudgetError) else look.on_cloud) for look in looks):
                raise
            return error
    return None


def _turn() -> anyio.Lock:
    """Returns this event loop's lock for looking whether there is room."""
    try:
        return _turns.get()
    except LookupError:
        _turns.set(lock := anyio.Lock())
        return lock


def _others(machines: SampleMachines) -> LatestEnds:
    return machines.session.ledger.latest_ends(machines.session.cloud.name)


def _may_help(last_end: datetime | None) -> bool:
    """Returns whether other environments run that a process will settle: their reservation and memory are free then."""
    return last_end is not None and last_end > now() - TEARDOWN


Services = dict[str, SandboxEnvironment]

_log = logging.getLogger("provisioner.inspect")


@dataclass(eq=False)
class _Fork:
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
_forks: dict[tuple[str, str | int | None, str], _Fork] = {}
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


async def bring_up_sample(
    machines: SampleMachines,
    origin: Origin,
    sample_id: str | int | None,
    start: Callable[[SampleMachines], Awaitable[Services]],
) -> Services:
    """Brings up the machines of a sample: anew, or as a copy of the first sample that may start as it does.

    Args:
        origin: which eval it is.
        sample_id: Inspect's id of the sample.
        start: returns the services in machines: starts them before they are frozen, and requires that a copy has them.

    Raises:
        ProvisionerError: it failed. If it was to be frozen, the next sample comes up anew and is frozen instead.
    """
    fork = _fork_of(machines, origin, sample_id)
    if fork and not fork.snapshot:
        machines.session.progress.phase_started("waiting for the environment that this sample is a copy of")
        async with fork.first:
            if not fork.snapshot:
                await bring_up(machines)
                services = await start(machines)
                await launch(partial(_freeze, fork, machines), machines.cancelled)
                return services
    if fork:
        machines.snapshot = fork.snapshot
    await bring_up(machines)
    return await start(machines)


def _fork_of(machines: SampleMachines, origin: Origin, sample_id: str | int | None) -> _Fork | None:
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
    found = _forks.setdefault(key, _Fork(origin.eval_id, whose))
    return None if _is_over(found) else found  # Inspect may run an epoch again later, at its user's request


def _is_over(fork: _Fork) -> bool:
    """Returns whether all epochs of a sample are over; False if Inspect has not said how many there are."""
    return len(fork.over) >= _most.get(fork.eval_id, {}).get("epochs", len(fork.over) + 1)


def _freeze(fork: _Fork, machines: SampleMachines) -> None:
    """Freezes machines. Others start from them even if this sample was cancelled meanwhile.

    A host without room for a snapshot fails no sample: the next one comes up anew, and tries again.
    """
    try:
        name = machines.freeze()
    except CapacityError as error:
        _log.warning("%s comes up anew, and so does the next for now. %s", machines.session.label, describe(error))
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
    _most.clear()
