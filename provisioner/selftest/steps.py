"""Runs the steps of a self-test, one after the other, and stops at the first that does not do what it says."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from provisioner.costs.prices import MICRO
from provisioner.errors import ProvisionerError
from provisioner.models import Record
from provisioner.progress import Progress


@dataclass(frozen=True)
class Step:
    """One step.

    Args:
        name: a few words.
        does: what it does, for an operator who decides whether it may.
        worst_micro_usd: its worst-case cost, in millionths of a US dollar.
        work: does it, and returns what was found. Raises a ProvisionerError for a surprise.
    """

    name: str
    does: str
    worst_micro_usd: int
    work: Callable[[], str]

    @property
    def costs(self) -> str:
        """The worst-case cost in words."""
        return f"at most {self.worst_micro_usd / MICRO:.4f} USD" if self.worst_micro_usd else "nothing"


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
        surprise: what stopped it; None if every step passed.
    """

    results: tuple[StepResult, ...]
    surprise: ProvisionerError | None


def run_steps(steps: Sequence[Step], progress: Progress) -> Outcome:
    """Runs the steps, and says before each what it does and costs."""
    results: list[StepResult] = []
    for number, step in enumerate(steps, 1):
        progress.note(f"{number} of {len(steps)}, {step.name}: {step.does} (costs {step.costs})")
        begin = time.monotonic()
        surprise: ProvisionerError | None = None
        try:
            found = step.work()
        except ProvisionerError as error:
            surprise, found = error, error.message
        seconds = round(time.monotonic() - begin, 1)
        results.append(StepResult(name=step.name, found=found, seconds=seconds, passed=surprise is None))
        progress.note(f"{'passed' if surprise is None else 'stopped'} after {seconds:.0f} s: {found}")
        if surprise is not None:
            return Outcome(tuple(results), surprise)
    return Outcome(tuple(results), None)
