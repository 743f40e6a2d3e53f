"""What all samples of this process share: budgets, clouds, leases, runs of Terraform, and what was said already."""

from __future__ import annotations

import threading
from collections import deque
from decimal import Decimal
from functools import cache
from pathlib import Path

from provisioner.clouds.cloud import Cloud
from provisioner.clouds.registry import Where, open_cloud
from provisioner.config import Settings, load_settings
from provisioner.costs.ledger import Spending
from provisioner.machines.apply_batcher import ApplyBatcher, host_slots
from provisioner.store.home import Home
from provisioner.store.locks import Leases

LEASES = Leases()
# `cache` alone lets each of two threads that ask at once make its own.
_LOCK = threading.Lock()
_CLOUDS: dict[tuple[Path, Where], Cloud] = {}

# Hundreds of samples need not say the same.
SAID: deque[tuple[str, ...]] = deque(maxlen=1000)


def is_new(*words: str) -> bool:
    """Returns whether this process says something for the first time, as far as it remembers, and remembers it."""
    with _LOCK:
        if words in SAID:
            return False
        SAID.append(words)
        return True


def process_spending(budget: Decimal | None) -> Spending:
    """One command for all samples of this process with the same budget, so that they share it."""
    with _LOCK:
        return _spending(budget)


@cache
def _spending(budget: Decimal | None) -> Spending:
    return Spending.of(load_settings(), budget)


def apply_batcher() -> ApplyBatcher:
    """Creates the machines of samples that start at about the same time together."""
    with _LOCK:
        return _batcher()


@cache
def _batcher() -> ApplyBatcher:
    return ApplyBatcher("inspect", host_slots())


def cloud(home: Home, settings: Settings, where: Where) -> Cloud:
    """Opens a cloud once for all samples: those of one cloud may share stacks, and ask AWS's API together.

    Raises:
        UsageError: there is no such place.
    """
    with _LOCK:
        key = (home.root, where)
        if key not in _CLOUDS:
            _CLOUDS[key] = open_cloud(home, settings, where)
        return _CLOUDS[key]
