"""Runs the steps of a self-test, one after the other, and stops at the first that does not do what it says."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from provisioner.costs.prices import MICRO, dollars
from provisioner.errors import BudgetError, ProvisionerError
from provisioner.models import Record
from provisioner.progress import Progress


@dataclass(frozen=True)
class Step:
    """One step.

    Args:
        name: a few words.
        does: what it does, for an operator who decides whether it may.
        worst_micro_usd: its worst-case cost, in millionths of a US dollar: what is reserved for it, if all its
            machines run at full load until their time limits.
        work: does it, and returns what was found. Raises a ProvisionerError for a failure.
        usual_micro_usd: what it costs if nothing is slow, in millionths of a US dollar.
    """

    name: str
    does: str
    worst_micro_usd: int
    work: Callable[[], str]
    usual_micro_usd: int = 0

    @property
    def costs(self) -> str:
        """The costs in words."""
        if not self.worst_micro_usd:
            return "nothing"
        return f"usually {self.usual_micro_usd / MICRO:.4f} USD, at most {self.worst_micro_usd / MICRO:.4f} USD"


def _spends_nothing() -> int:
    return 0


@dataclass(frozen=True)
class Purse:
    """What a self-test has spent, and may spend.

    Args:
        spent: returns what the ledger counts so far, in millionths of a US dollar.
        limit_micro_usd: no step begins that would usually exceed it; None for no limit.
    """

    spent: Callable[[], int] = _spends_nothing
    limit_micro_usd: int | None = None

    def require_room(self, step: Step) -> None:
        """Makes sure that a step usually stays within the limit.

        Raises:
            BudgetError: it does not.
        """
        if self.limit_micro_usd is None or not step.usual_micro_usd:
            return
        spent = self.spent()
        if spent + step.usual_micro_usd > self.limit_micro_usd:
            raise BudgetError(
                f"The steps before have cost {dollars(spent)}, and this one usually costs "
                f"{dollars(step.usual_micro_usd)}: more than {dollars(self.limit_micro_usd)} together.",
                hint="Machines took longer than they usually do; the report says how long. Run the check again: what "
                "is built is not built again.",
            )


class StepResult(Record):
    """A step that was done.

    Args:
        found: what it found; of the step that failed, what was wrong.
    """

    name: str
    found: str
    seconds: float
    passed: bool


@dataclass(frozen=True)
class Outcome:
    """What came of a self-test.

    Args:
        results: of the steps that were begun, in their order.
        failure: what stopped it; None if every step passed.
    """

    results: tuple[StepResult, ...]
    failure: ProvisionerError | None


def run_steps(steps: Sequence[Step], progress: Progress, purse: Purse | None = None) -> Outcome:
    """Runs the steps, and says before each what it does and costs.

    Args:
        purse: what may be spent; None for no limit but the budget of each launch.
    """
    purse = purse or Purse()
    results: list[StepResult] = []
    for number, step in enumerate(steps, 1):
        progress.note(f"{number} of {len(steps)}, {step.name}: {step.does} (costs {step.costs})")
        begin = time.monotonic()
        failure: ProvisionerError | None = None
        try:
            purse.require_room(step)
            found = step.work()
        except ProvisionerError as error:
            failure, found = error, error.message
        seconds = round(time.monotonic() - begin, 1)
        results.append(StepResult(name=step.name, found=found, seconds=seconds, passed=failure is None))
        progress.note(f"{'passed' if failure is None else 'stopped'} after {seconds:.0f} s: {found}")
        if failure is not None:
            return Outcome(tuple(results), failure)
    return Outcome(tuple(results), None)
