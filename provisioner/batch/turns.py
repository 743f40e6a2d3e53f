"""Lets a batch's attempts take turns: all may have machines that are up, and only so many may work in them at once.

Nothing waits in a circle. An attempt waits for its turn once it has all else that it ever waits for: its place in the
queue, its reservation, its machines. One that has its turn waits only for its own machines, whose commands end in time,
and gives the turn back before it waits for anything that others have: for the budget, for capacity, for the next
attempt. Who waits for the budget has neither turn nor reservation. So whoever has a turn comes to its end, then
whoever waits for one gets it, and what they had reserved is settled for whoever waits for the budget.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from provisioner.batch.liveness import LivenessLock
from provisioner.batch.results import WAITING
from provisioner.clock import now
from provisioner.environment import verdicts
from provisioner.environment.extend import move_end
from provisioner.errors import BudgetError, LivenessLostError, TurnLostError
from provisioner.models import Environment
from provisioner.session import Phases, Session
from provisioner.ttl import MAX_TTL

POLL_SECONDS = 0.5
# A shorter wait takes nothing from the time to live that would be worth moving every timer.
UNNOTICED_SECONDS = 1.0


class Turns:
    """The turns of a batch's runs in this process, and in all workers that share a database.

    In a process, whoever came first is first. Between workers, whoever asks first when a turn is free.

    Args:
        batch: the batch's id.
        count: how many runs may have a turn at once.
        locks: what workers share; a turn is a lock of the database, so that it ends with its worker. None: this process
            works on the batch alone.
    """

    def __init__(self, batch: str, count: int, locks: LivenessLock | None = None) -> None:
        self._names = [f"{batch} turn {number}" for number in range(count)]
        self._locks = locks
        self._held: dict[Turn, str | None] = {}
        self._waiting: list[Turn] = []
        self._arrivals = itertools.count(1)
        self._changed = threading.Condition()
        # Held while a turn is given out, during which the database may be slow; giving back never waits for it.
        self._giving = threading.Lock()

    def take(self, turn: Turn, check: Callable[[], None]) -> None:
        """Waits until a run has a turn. Returns at once if it has one.

        Args:
            check: called regularly; raises an exception to end the wait.
        """
        with self._changed:
            turn.place = turn.place or next(self._arrivals)
            self._waiting.append(turn)
        try:
            while True:
                check()
                if self._give(turn, in_line=True):
                    return
                with self._changed:
                    self._changed.wait(POLL_SECONDS)
        finally:
            with self._changed:
                self._waiting.remove(turn)
                self._changed.notify_all()

    def resume(self, turn: Turn) -> None:
        """Counts a run that goes on with what it has begun as having a turn, even if that makes them too many."""
        if not self._give(turn, in_line=False):
            with self._changed:
                self._held[turn] = None

    def release(self, turn: Turn) -> None:
        """Gives a turn back. Does nothing if the run has none."""
        with self._changed:
            name = self._held.pop(turn, None)
            self._changed.notify_all()
        if name and self._locks:
            self._locks.give_back(name)

    def _give(self, turn: Turn, *, in_line: bool) -> bool:
        """Gives a run a turn if one is free, and returns whether it has one.

        Args:
            in_line: whether it must be the first of those that wait.
        """
        with self._giving:
            with self._changed:
                if turn in self._held:
                    return True
                first = min(self._waiting, key=lambda waiting: waiting.place, default=turn)
                if (in_line and first is not turn) or len(self._held) >= len(self._names):
                    return False
                taken = self._held.values()
                names = [name for name in self._names if name not in taken]
            name = self._lock(names)
            if name is not None:
                with self._changed:
                    self._held[turn] = name
            return name is not None

    def _lock(self, names: list[str]) -> str | None:
        if self._locks is None:
            return names[0]
        try:
            return self._locks.take_first(names)
        except LivenessLostError:  # the worker notices it as well, and stops its runs
            return None


class Turn:
    """A run's turn.

    Args:
        turns: of the batch; None if its runs need no turn.

    Attributes:
        place: in the line; 0 until it has waited. Kept through all of the run's attempts, so that one whose environment
            is replaced while it waits does not fall behind those that came later.
    """

    def __init__(self, turns: Turns | None = None) -> None:
        self._turns = turns
        self.place = 0

    def resume(self) -> None:
        """Goes on with what an earlier process had begun in the run's turn. Waits for nothing: an agent may be at work.

        The ttl of its environment, and its agent's time, run in any case.
        """
        if self._turns:
            self._turns.resume(self)

    def release(self) -> None:
        """Gives the turn back. Does nothing if the run has none."""
        if self._turns:
            self._turns.release(self)

    def wait(self, session: Session, environment: Environment, phases: Phases) -> Environment:
        """Waits for the turn, and then gives the environment back the time to live that has passed meanwhile.

        Its machines may end meanwhile. That is noticed as soon as they are used.

        Args:
            environment: proven isolated, with start() not begun, and locked by this process.

        Returns:
            the updated record.

        Raises:
            TurnLostError: its time to live ended, it was destroyed, or its longer life does not fit a budget. The turn
                is given back.
            MachineLostError: a machine does not answer any more; the message says what the cloud says.
        """
        if self._turns is None:
            return environment

        def check() -> None:
            session.check()
            if now() >= environment.expires_at:
                raise TurnLostError("its time to live ended while it waited for its turn")
            if not session.environments.exists(environment.id):
                raise TurnLostError("its environment is gone")

        begin = time.monotonic()
        with phases.phase(WAITING):
            self._turns.take(self, check)
            waited_seconds = time.monotonic() - begin
            if waited_seconds < UNNOTICED_SECONDS:
                return environment
            later = environment.expires_at + timedelta(seconds=waited_seconds)
            try:
                with verdicts.blamed(session, environment):
                    return move_end(session, environment, min(later, environment.created_at + MAX_TTL))
            except BudgetError as error:
                self.release()
                raise TurnLostError("the budget had no room for the time that it waited for its turn") from error
