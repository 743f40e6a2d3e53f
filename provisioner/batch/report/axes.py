"""Chooses axes with round numbers, and places values on them in per cent of their length. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from provisioner.ttl import format_duration

INTERVALS = 4
# Steps of time that people count in, in seconds. Beyond them, whole days.
_DAY = 86400
_TIMES = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 2 * 3600, 3 * 3600, 6 * 3600, 12 * 3600, _DAY)


@dataclass(frozen=True)
class Tick:
    """A number on an axis, and where it is, in per cent."""

    at: float
    label: str


@dataclass(frozen=True)
class Axis:
    """An axis.

    Args:
        low, high: its ends.
        ticks: its numbers, both ends included.
    """

    low: float
    high: float
    ticks: tuple[Tick, ...]

    def place(self, value: float | None) -> float | None:
        """Returns where a value is, from 0 to 100 per cent; None for none."""
        if value is None or math.isnan(value):
            return None
        return round(max(0.0, min(100.0, (value - self.low) / (self.high - self.low) * 100)), 2)


def score_axis(values: Sequence[float], low: float = 0.0, high: float = 1.0) -> Axis:
    """Returns an axis of round numbers that holds all finite values, and at least all from `low` to `high`."""
    finite = [value for value in values if math.isfinite(value)]
    least, most = min([low, *finite]), max([high, *finite])
    if not 1e-300 < most - least < 1e300:  # a family may return any finite number
        return _axis(low, high, (high - low) / INTERVALS, _number)
    step = _round_step((most - least) / INTERVALS)
    return _axis(math.floor(least / step + 1e-9) * step, math.ceil(most / step - 1e-9) * step, step, _number)


def count_axis(most: int) -> Axis:
    """Returns an axis of whole numbers from 0 on."""
    step = max(1, round(_round_step(most / INTERVALS))) if most > 0 else 1
    return _axis(0, max(1, math.ceil(most / step)) * step, step, _number)


def amount_axis(most: float) -> Axis:
    """Returns an axis of round numbers from 0 on."""
    return score_axis([most], 0.0, most if most > 0 else 1.0)


def time_axis(seconds: float) -> Axis:
    """Returns an axis of round durations from 0 on."""
    wanted = min(max(seconds, 1.0), 1e9) / INTERVALS
    step = next((time for time in _TIMES if time >= wanted), math.ceil(wanted / _DAY) * _DAY)
    high = math.ceil(min(max(seconds, 1.0), 1e9) / step - 1e-9) * step
    return _axis(0, high, step, lambda value, _: format_duration(timedelta(seconds=value)) if value else "0")


def _round_step(wanted: float) -> float:
    """Returns the least of 1, 2 and 5 times a power of ten that is not less."""
    power: float = 10.0 ** math.floor(math.log10(wanted))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= wanted * (1 - 1e-9))


def _axis(low: float, high: float, step: float, label: Callable[[float, float], str]) -> Axis:
    count = round((high - low) / step)
    ticks = tuple(Tick(round(100 * n / count, 2), label(low + n * step, step)) for n in range(count + 1))
    return Axis(low, high, ticks)


def _number(value: float, step: float) -> str:
    if abs(value) < step / 2:
        return "0"
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    decimals += round(step * 10**decimals, 6) % 1 > 0  # a quarter has two
    return f"{value:.{decimals}f}" if decimals < 7 and abs(value) < 1e7 else f"{value:g}"
