"""Computes means of scores with their standard errors, as Inspect's metrics `mean` and `stderr` do. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Mean:
    """A mean and its standard error.

    Args:
        count: how many numbers it is the mean of.
        stderr: None for a single number, and for numbers too large to compute with.
    """

    count: int
    value: float
    stderr: float | None = None

    def __str__(self) -> str:
        return f"{self.value:.2f}" + ("" if self.stderr is None else f" ± {self.stderr:.2f}")

    @property
    def low(self) -> float | None:
        """The mean less one standard error."""
        return None if self.stderr is None else self.value - self.stderr

    @property
    def high(self) -> float | None:
        """The mean and one standard error."""
        return None if self.stderr is None else self.value + self.stderr


def mean(scores: Sequence[float]) -> Mean | None:
    """Returns the mean of scores, ignoring NaN; None without any."""
    numbers = [score for score in scores if not math.isnan(score)]
    if not numbers:
        return None
    count = len(numbers)
    try:
        value = math.fsum(numbers) / count
        squares = math.fsum((number - value) ** 2 for number in numbers)
    except OverflowError:  # a family may return any finite number
        most = max(map(abs, numbers))
        return Mean(count, math.fsum(number / most for number in numbers) / count * most)
    return Mean(count, value, math.sqrt(squares / (count - 1) / count) if count > 1 else None)


def mean_of_means(groups: Sequence[Sequence[float]]) -> Mean | None:
    """Returns the mean of groups' means, each with the same weight; of a single group, the mean of its scores."""
    means = [found for group in groups if (found := mean(group))]
    return mean([each.value for each in means]) if len(means) > 1 else next(iter(means), None)
