"""Tests operations in a running machine, over real SSH with a fake of the guest helper."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from provisioner.base.clock import now
from provisioner.base.errors import MissingVariablesError, SubmissionError, TaskError, UsageError
from provisioner.base.models import Environment
from provisioner.driver.task_driver import TaskDriver
from provisioner.environment import operations
from provisioner.machines.connect import connect
from provisioner.session import Session
from provisioner.ssh.connection import Connection
from tests.unit.fakes.guest import Fails, Guest
from tests.unit.fakes.world import environment, told_of, up, with_aux


@pytest.fixture
def driver(session: Session, env: Environment) -> Iterator[TaskDriver]:
    with connect(session, env, "primary") as connection:
        yield operations.driver(session, env, connection)


@pytest.fixture
def agent(session: Session, env: Environment) -> Iterator[Connection]:
    with connect(session, env, "primary") as connection:
        yield connection


def changed(session: Session, env: Environment, **changes: Any) -> Environment:
    setup = env.setup.model_copy(update=changes.pop("setup", {}))
    return session.environments.update(env, setup=setup, **changes)


def log(session: Session, name: str) -> str:
    return (session.environments.logs("env") / f"{name}.log").read_text()


def test_start_gets_only_the_tasks_variables(
    session: Session, env: Environment, guest: Guest, driver: TaskDriver
) -> None:
    session = replace(session, variables={"TOKEN": "s3cret-value", "OTHER": "x"})
    env = changed(session, env, setup={"required_environment_variables": ("TOKEN",)})
    operations.start(session, env, driver, skip_chown=True)
    start, home = guest.requests
    assert (start["operation"], start["task"], start["environment"]) == ("start", "main", {"TOKEN": "s3cret-value"})
    assert (home["instructions"], home["skip_chown"], home["environment"]) == ("Do it.", True, {})


def test_a_failed_start_reports_its_error_and_makes_no_home(
    session: Session, env: Environment, guest: Guest, driver: TaskDriver
) -> None:
    guest.values["start"] = Fails("no such flag")
    guest.says["start"] = "looking for s3cret-value\n"
    with pytest.raises(TaskError, match=r"start\(\) raised ValueError: no such flag") as caught:
        operations.start(session, env, driver, skip_chown=False)
    assert caught.value.details == "looking for [redacted:TOKEN]"
    assert guest.operations == ["start"]
    assert told_of(session).texts == ["looking for [redacted:TOKEN]\n"]
    assert log(session, "start") == "looking for [redacted:TOKEN]\n"


def test_a_missing_variable_is_reported_before_anything_runs(
    session: Session, env: Environment, guest: Guest, driver: TaskDriver
) -> None:
    env = changed(session, env, setup={"required_environment_variables": ("MISSING",)})
    with pytest.raises(MissingVariablesError, match="MISSING"):
        operations.start(session, env, driver, skip_chown=False)
    assert guest.requests == []


def test_with_an_aux_vm_the_task_gets_its_address_and_key(session: Session) -> None:
    alone = environment("alone")
    assert operations.vm_variables(session, alone) == {}
    env = up(session, environment(roles=("primary", "aux")))
    variables = operations.vm_variables(session, env)
    assert variables == {
        "VM_SSH_USERNAME": "admin",
        "VM_SSH_PRIVATE_KEY": session.environments.key("env", "task").private,
        "VM_IP_ADDRESS": "192.0.2.3",
    }
    wants = env.setup.model_copy(update={"required_environment_variables": ("VM_IP_ADDRESS",)})
    env = session.environments.update(env, setup=wants)
    assert operations.task_variables(session, env) == {"VM_IP_ADDRESS": "192.0.2.3"}


def test_the_task_logs_in_as_ubuntu_on_an_ubuntu(session: Session) -> None:
    env = up(session, with_aux("ubuntu-20.04-cuda"))
    assert operations.vm_variables(session, env)["VM_SSH_USERNAME"] == "ubuntu"


def test_a_teardown_has_two_minutes(session: Session, env: Environment, guest: Guest, driver: TaskDriver) -> None:
    operations.teardown(session, env, driver)
    assert guest.request("teardown")["timeout_seconds"] == 120


@pytest.mark.parametrize(
    ("answer", "submission"),
    [
        ({"found": True, "text": "s3cret-value"}, "s3cret-value"),
        ({"found": False}, None),
        ({"found": True, "text": ""}, ""),
    ],
    ids=["text", "none", "empty"],
)
def test_a_submission_is_read_unchanged(
    guest: Guest, driver: TaskDriver, answer: dict[str, object], submission: str | None
) -> None:
    guest.values["read_submission"] = answer
    assert operations.read_submission(driver) == submission


def test_a_submission_that_is_not_a_file_is_a_submission_error(guest: Guest, driver: TaskDriver) -> None:
    guest.values["read_submission"] = {"found": False, "reason": "it is a directory"}
    with pytest.raises(SubmissionError, match="cannot be read: it is a directory"):
        operations.read_submission(driver)


@pytest.mark.parametrize(
    ("given", "read", "scored"),
    [("7", {"found": True, "text": "42"}, b"7"), (None, {"found": True, "text": "42"}, b"42"), (None, {}, b"")],
    ids=["given", "file", "none"],
)
def test_the_given_submission_or_else_the_file_is_scored(
    session: Session, env: Environment, guest: Guest, driver: TaskDriver, given: str | None, read: object, scored: bytes
) -> None:
    guest.values["read_submission"] = read
    updated, outcome = operations.end_score(session, env, driver, given)
    assert (outcome.kind, outcome.score, updated) == ("scored", 0.5, env)
    assert guest.files == {guest.request("score")["submission"]: scored}
    kept = session.environments.logs(env.id) / operations.SUBMISSION_KEPT
    assert (kept.read_bytes() if kept.exists() else b"") == scored


def test_the_submission_is_kept_bounded_without_secrets(
    session: Session, env: Environment, driver: TaskDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "KEPT_CHARACTERS", 40)
    secret = session.variables["TOKEN"]
    operations.end_score(session, env, driver, f"it is {secret} " + "x" * 100)
    kept = session.environments.logs(env.id) / operations.SUBMISSION_KEPT
    assert kept.read_text() == ("it is [redacted:TOKEN] " + "x" * 100)[:40]

    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(operations, "write_log", full)
    assert operations.end_score(session, env, driver, "7")[1].score == 0.5
    assert "Keeping the submission" in told_of(session).notes[-1]


@pytest.mark.parametrize(
    ("value", "kind"),
    [(None, "manual_scoring_required"), ("high", "not_a_number"), (Fails(), "exception"), (True, "not_a_number")],
    ids=["none", "text", "exception", "true"],
)
def test_the_return_value_of_score_is_checked(
    session: Session, env: Environment, guest: Guest, driver: TaskDriver, value: object, kind: str
) -> None:
    guest.values["score"] = value
    assert operations.end_score(session, env, driver, "7")[1].kind == kind


def test_a_family_without_scoring_is_not_scored(
    session: Session, env: Environment, guest: Guest, driver: TaskDriver
) -> None:
    _, outcome = operations.end_score(session, changed(session, env, has_score=False), driver, "7")
    assert outcome.kind == "not_scored"
    assert told_of(session).notes[-1] == "The submission is not used: the family has no score()."
    assert guest.requests == []


def test_aggregate_scores_gets_the_whole_log_with_the_last_score(
    session: Session, env: Environment, guest: Guest, driver: TaskDriver
) -> None:
    env = changed(session, env, has_intermediate_score=True, has_aggregate_scores=True, has_score=True)
    guest.values["intermediate_score"] = {"score": math.nan}
    env, _ = operations.intermediate_score(session, env, driver)
    guest.values["intermediate_score"] = {"score": 0.5, "message": {"a": 1}, "details": {"b": 2}}
    updated, outcome = operations.end_score(session, env, driver, "7")
    assert (outcome.score, len(updated.score_log)) == (0.75, 2)
    assert "The submission is not used: the family is scored by aggregate_scores()." in told_of(session).notes
    [written] = guest.files.values()
    first, second = json.loads(written)
    assert math.isnan(first["score"])
    assert (second["score"], second["message"], second["details"]) == (0.5, {"a": 1}, {"b": 2})
    assert "score" not in guest.operations


def test_aggregate_scores_does_not_get_a_first_score_that_failed(
    session: Session, env: Environment, guest: Guest, driver: TaskDriver
) -> None:
    env = changed(session, env, has_intermediate_score=True, has_aggregate_scores=True)
    guest.values["intermediate_score"] = Fails("not built yet")
    env = operations.first_score(session, env, driver)
    guest.values["intermediate_score"] = 0.5
    updated, _ = operations.end_score(session, env, driver, None)
    [written] = guest.files.values()
    assert ([entry.score for entry in updated.score_log], len(json.loads(written))) == ([None, 0.5], 1)


@pytest.mark.parametrize("has_score", [True, False], ids=["beside-score", "alone"])
def test_a_failed_last_intermediate_score_counts_without_score(
    session: Session, env: Environment, guest: Guest, driver: TaskDriver, has_score: bool
) -> None:
    env = changed(session, env, has_intermediate_score=True, has_aggregate_scores=not has_score, has_score=has_score)
    guest.values["intermediate_score"] = Fails("disk full")
    if has_score:
        assert operations.end_score(session, env, driver, "7")[1].score == 0.5
        assert any("disk full" in note for note in told_of(session).notes)
    else:
        with pytest.raises(TaskError, match="disk full"):
            operations.end_score(session, env, driver, "7")


def test_a_hidden_intermediate_score_is_logged(
    session: Session, env: Environment, guest: Guest, driver: TaskDriver
) -> None:
    guest.says["intermediate_score"] = "12 of 48\n"
    env = changed(session, env, has_intermediate_score=True, score_visible_to_agent=False)
    updated, result = operations.intermediate_score(session, env, driver)
    assert result.visible == {"status": "scored", "message": {"a": 1}}
    assert result.stdout == "12 of 48\n"
    assert updated.score_log == (result.entry,)
    assert session.environments.find("env").score_log == updated.score_log
    assert updated.score_log[0].details == {"b": 2}


def test_a_score_from_before_the_clock_was_set_back_took_no_negative_time(
    session: Session, env: Environment, driver: TaskDriver
) -> None:
    env = changed(session, env, has_intermediate_score=True, started_at=now() + timedelta(hours=3))
    updated, _ = operations.intermediate_score(session, env, driver)
    assert [entry.elapsed_seconds for entry in updated.score_log] == [0]


def test_an_answer_without_a_score_adds_no_log_entry(
    session: Session, env: Environment, guest: Guest, driver: TaskDriver
) -> None:
    guest.values["intermediate_score"] = {"message": {"a": 1}}
    updated, result = operations.intermediate_score(
        session, changed(session, env, has_intermediate_score=True), driver
    )  # fmt: skip
    assert (updated.score_log, result.entry, result.visible["status"]) == ((), None, "no_score")


def test_intermediate_scoring_without_any_is_a_usage_error(
    session: Session, env: Environment, driver: TaskDriver
) -> None:
    with pytest.raises(UsageError, match="fam has no intermediate_score"):
        operations.intermediate_score(session, env, driver)
