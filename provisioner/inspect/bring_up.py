"""Brings up a sample's machines, and waits while others have what they need. No launch waits in its own thread.

Launches have a bounded number of threads. Samples that wait in them for the budget would keep out those that run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import datetime
from functools import partial

import anyio
import anyio.lowlevel

from provisioner.clock import now
from provisioner.costs.ledger import LatestEnds
from provisioner.errors import BudgetError, ProvisionerError, ShortageError
from provisioner.inspect.blocking import end, launch
from provisioner.inspect.sample import SampleMachines
from provisioner.inspect.wording import for_inspect
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
