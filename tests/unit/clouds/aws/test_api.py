"""Which region is used, threads that share an Api, and cached answers. What AWS's errors become, tests/aws shows."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import boto3
import pytest

from provisioner.base.errors import InfrastructureError, UsageError
from provisioner.clouds.aws.api import AnswerCache, Api
from tests.waiting import BOUND_SECONDS


def test_the_region_is_the_one_given_or_that_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    with pytest.raises(UsageError, match="No AWS region") as caught:
        Api(None, None)
    assert "AWS_REGION" in (caught.value.hint or "")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-west-2")
    assert Api(None, None).region == "us-west-2"
    # As the message says, and as Terraform reads it.
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    assert Api(None, None).region == "eu-west-1"
    assert Api(None, "eu-north-1").region == "eu-north-1"


def test_threads_that_come_together_do_not_make_clients_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    making, most = [0], [0]
    lock = threading.Lock()

    def client(*_: Any, **__: Any) -> object:
        with lock:
            making[0] += 1
            most[0] = max(most[0], making[0])
        time.sleep(0.02)  # as long as botocore takes to read a service's description
        with lock:
            making[0] -= 1
        return object()

    api = Api(None, "us-east-1")
    monkeypatch.setattr(boto3.Session, "client", client)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(api.client, ["ec2", "scheduler", "iam", "sts"] * 2))
    assert most == [1]


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
