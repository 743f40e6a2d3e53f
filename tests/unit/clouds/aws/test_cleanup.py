from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from provisioner.base.errors import StillThereError
from provisioner.clouds.aws import cleanup, schedules
from provisioner.clouds.aws.account import Account
from provisioner.clouds.aws.cleanup import AwsCleanUp
from provisioner.clouds.cloud import EnvironmentResources

FOUND = EnvironmentResources("env", region="eu-west-1")


@pytest.fixture
def cleaning(monkeypatch: pytest.MonkeyPatch) -> AwsCleanUp:
    """The clean-up of an account in which nothing exists."""
    monkeypatch.setattr(schedules, "names", lambda *_: iter(()))
    monkeypatch.setattr(cleanup, "instances", lambda *_: [])
    monkeypatch.setattr(cleanup, "remove", lambda *_: None)
    monkeypatch.setattr(cleanup, "remaining", lambda *_: [])
    cleaning = AwsCleanUp()
    cleaning.account = cast("Account", SimpleNamespace(api=None))
    return cleaning


@pytest.mark.parametrize(
    ("instances", "scheduled", "complete"),
    [
        ([], [], False),
        (["primary", "aux"], [], False),
        (["primary", "aux"], ["env.aux"], False),
        (["primary", "aux"], ["env.aux", "env.primary"], True),
        (["primary"], ["env.primary", "env.aux"], True),  # EC2 has forgotten the other, which ended long ago
    ],
)
def test_only_the_schedules_show_a_complete_environment(
    cleaning: AwsCleanUp,
    monkeypatch: pytest.MonkeyPatch,
    instances: list[str],
    scheduled: list[str],
    complete: bool,
) -> None:
    known = [{"Tags": [{"Key": "provisioner:role", "Value": role}]} for role in instances]
    monkeypatch.setattr(cleanup, "instances", lambda *_: known)
    monkeypatch.setattr(schedules, "names", lambda *_: iter(scheduled))
    assert cleaning.delete_resources(FOUND) is complete


def test_what_cannot_be_removed_is_named(cleaning: AwsCleanUp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cleanup, "remaining", lambda *_: ["volume vol-1"])
    with pytest.raises(StillThereError, match="env is not gone: volume vol-1"):
        cleaning.delete_resources(FOUND)
