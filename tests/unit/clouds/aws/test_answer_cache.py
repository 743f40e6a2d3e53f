"""Callers that ask AWS the same at once ask once, and keep the answer for a short time."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from provisioner.clouds.aws.api import AnswerCache
from provisioner.errors import InfrastructureError
from tests.waiting import BOUND_SECONDS

FOREVER = 3600.0


def test_many_at_once_ask_once_and_all_get_the_answer() -> None:
    cache, asked, all_there = AnswerCache(FOREVER), [], threading.Barrier(8)

    def ask() -> str:
        asked.append(1)
        return "ami-1"

    def one(_: int) -> str:
        all_there.wait(BOUND_SECONDS)
        return cache.get("image", ask)

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(one, range(8))) == {"ami-1"}
    assert len(asked) == 1


def test_each_question_has_its_own_answer() -> None:
    cache = AnswerCache(FOREVER)
    assert [cache.get(key, partial(int, key)) for key in ("1", "2", "1")] == [1, 2, 1]


def test_an_old_answer_does_not_count() -> None:
    cache, answers = AnswerCache(0.0), iter(["first", "second"])
    assert [cache.get("image", lambda: next(answers)) for _ in range(2)] == ["first", "second"]


def test_what_is_missing_is_asked_for_again() -> None:
    cache, answers = AnswerCache(FOREVER), iter([False, True, False])
    assert [cache.get("image", lambda: next(answers)) for _ in range(3)] == [False, True, True]


def test_what_fails_is_asked_for_again() -> None:
    cache = AnswerCache(FOREVER)

    def fail() -> str:
        raise InfrastructureError("no answer")

    with pytest.raises(InfrastructureError):
        cache.get("image", fail)
    assert cache.get("image", lambda: "ami-1") == "ami-1"
