"""AWS as moto tells it: the API's answers are real, the provider is real, the machines are not."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.aws.account import NOTHING, Account, MakeEnvironment, make_environment
from tests.aws.proxy import FaultyApi, serving


@pytest.fixture(scope="session")
def api() -> Iterator[FaultyApi]:
    """The API of an account, in this process. Tests share it, and with it each region's network."""
    with serving() as served:
        yield served


@pytest.fixture
def account(api: FaultyApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Account]:
    """The account behind it; no test leaves anything in it but networks."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # no configuration of whoever runs the tests
    monkeypatch.setenv("AWS_ENDPOINT_URL", api.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    opened = Account(tmp_path)
    yield opened
    api.faults.clear()
    api.requests.clear()
    left = opened.everything()
    if left != NOTHING:  # the next test shall not fail for this one
        urllib.request.urlopen(urllib.request.Request(f"{api.url}/moto-api/reset", method="POST")).close()
    assert left == NOTHING


@pytest.fixture
def environment() -> MakeEnvironment:
    """Makes the record of an environment that does not exist yet."""
    return make_environment
