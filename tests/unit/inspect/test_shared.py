"""Tests that samples of one process share what they have to share, however they begin."""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal

import pytest

from provisioner.config import Settings
from provisioner.inspect import shared
from tests.waiting import BOUND_SECONDS


def test_samples_that_begin_at_once_share_one_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly() -> Settings:
        time.sleep(0.1)
        return Settings()

    def slots() -> int:
        time.sleep(0.1)
        return 1

    monkeypatch.setattr(shared, "load_settings", slowly)
    monkeypatch.setattr(shared, "host_slots", slots)
    together = threading.Barrier(16)

    def begin(_: int) -> tuple[str | None, int]:
        together.wait(BOUND_SECONDS)
        return shared.process_spending(Decimal("12.3456")).command, id(shared.apply_batcher())

    shared._batcher.cache_clear()
    with ThreadPoolExecutor(16) as threads:
        made = set(threads.map(begin, range(16)))
    shared._batcher.cache_clear()
    assert len(made) == 1


def test_threads_at_once_say_a_thing_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(deque[tuple[str, ...]]):
        def __contains__(self, words: object) -> bool:
            is_known = super().__contains__(words)
            time.sleep(0.05)
            return is_known

    monkeypatch.setattr(shared, "SAID", Slow())
    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(lambda _: shared.is_new("word"), range(8))) == 1


def test_what_was_said_is_remembered_up_to_a_bound() -> None:
    assert [shared.is_new("first"), shared.is_new("first")] == [True, False]
    for number in range(2000):
        shared.is_new(str(number))
    assert len(shared.SAID) == 1000
    assert shared.is_new("first")
