"""Tests that whatever does not come up is cleared away, and what the operator gets to know of it."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable

import pytest

from provisioner.base.errors import StillThereError, UsageError
from provisioner.base.models import Environment
from provisioner.machines.destroy import clear_away
from provisioner.machines.launch import MayKeep, launched
from provisioner.session import Session
from provisioner.store.environments import RECORD
from provisioner.store.files import is_locked
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.cloud import assert_nothing_is_left as assert_no_machine_is_left
from tests.unit.fakes.world import environment, told_of


def never(*_: object) -> bool:
    return False


def always(*_: object) -> bool:
    return True


def fail(
    session: Session, error: BaseException, act: Callable[[Environment], object], may_keep: MayKeep = never
) -> None:
    """Launches an environment, does something with it, and fails."""
    with launched(session, environment(), may_keep, phase=contextlib.nullcontext()) as env:
        act(env)
        raise error


def launch(session: Session, **options: object) -> contextlib.AbstractContextManager[Environment]:
    """Launches an environment of one machine."""
    return launched(session, environment(), never, phase=contextlib.nullcontext(), **options)  # type: ignore[arg-type]


def stick(cloud: FakeCloud) -> None:
    """Has neither Terraform nor the cloud remove any machine."""
    cloud.terraform_fails("destroy")
    cloud.faults.stuck = True


def assert_nothing_is_left(session: Session, cloud: FakeCloud) -> None:
    assert_no_machine_is_left(session, cloud)
    assert not is_locked(session.environments.lease("env"))


def test_what_comes_up_stays_after_the_body(session: Session, cloud: FakeCloud) -> None:
    with launch(session) as env:
        assert env.endpoints
    assert cloud.existing() == ["env/primary"]
    assert is_locked(session.environments.lease("env"))


def test_what_is_temporary_is_cleared_away_after_the_body(session: Session, cloud: FakeCloud) -> None:
    with launch(session, temporary=True):
        assert cloud.existing() == ["env/primary"]
    assert_nothing_is_left(session, cloud)
    assert session.environments.find("env", archived=True).breakdown is None
    assert told_of(session).notes == []


@pytest.mark.parametrize(
    "error", [ValueError("no flag"), KeyboardInterrupt(), FileNotFoundError("no bundle")], ids=repr
)
def test_a_failed_body_leaves_nothing_but_the_reason(session: Session, cloud: FakeCloud, error: BaseException) -> None:
    with pytest.raises(type(error)), launch(session):
        raise error
    assert_nothing_is_left(session, cloud)
    archived = session.environments.find("env", archived=True)
    assert archived.breakdown
    assert (session.home.archive / "env/logs/console-primary.log").read_text().endswith("console line 19 of primary\n")
    [note] = told_of(session).notes
    assert note.startswith("Destroying env: ")
    assert note.removeprefix("Destroying env: ") == archived.breakdown.message


def test_a_file_missing_since_another_destroyed_it_says_so(session: Session, cloud: FakeCloud) -> None:
    with pytest.raises(UsageError, match="env has been destroyed"):
        fail(session, FileNotFoundError("env"), lambda env: clear_away(session, env))
    assert_nothing_is_left(session, cloud)


def test_a_failed_clean_up_after_success_is_no_breakdown(session: Session, cloud: FakeCloud) -> None:
    with pytest.raises(StillThereError), launch(session, temporary=True):
        stick(cloud)
    [record] = session.environments.all()
    assert record.breakdown is None
    assert not [note for note in told_of(session).notes if note.startswith("Destroying")]
    assert cloud.runs().count("destroy env") == 1


def test_no_reason_is_written_over_an_unreadable_record(session: Session, cloud: FakeCloud) -> None:
    record = session.environments.directory("env") / RECORD

    def damage(_: Environment) -> None:
        stick(cloud)
        record.write_text("{")

    with pytest.raises(StillThereError):
        fail(session, ValueError("no flag"), damage)
    assert any(note.startswith("Recording why env ends") for note in told_of(session).notes)


def test_a_kept_environment_of_unreadable_record_is_destroyed(session: Session, cloud: FakeCloud) -> None:
    def damage(env: Environment) -> None:
        (session.environments.directory(env.id) / RECORD).write_text("{")

    with pytest.raises(ValueError, match="no flag"):
        fail(session, ValueError("no flag"), damage, always)
    assert any(note.startswith("Keeping env: The record ") for note in told_of(session).notes)
    assert_nothing_is_left(session, cloud)


def test_an_unreadable_home_prevents_no_destruction(
    session: Session, cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(_: str) -> bool:
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(FileNotFoundError, match="no bundle"):
        fail(
            session,
            FileNotFoundError("no bundle"),
            lambda _: monkeypatch.setattr(session.environments, "exists", unreadable),
        )
    assert cloud.existing() == []


def test_what_failed_is_kept_if_wanted(session: Session, cloud: FakeCloud) -> None:
    asked = []

    def may_keep(_: Session, env: Environment, error: BaseException) -> bool:
        asked.append((env.status, str(error)))
        return True

    with pytest.raises(ValueError, match="no flag"):
        fail(session, ValueError("no flag"), lambda env: session.environments.update(env, status="ready"), may_keep)
    assert asked == [("ready", "no flag")]  # the record as it is by then
    [record] = session.environments.all()
    assert (record.attended, record.breakdown and record.breakdown.message) == (False, "ValueError no flag")
    assert cloud.existing() == ["env/primary"]
    assert [note.split(":")[0] for note in told_of(session).notes] == ["Kept env"]


def test_what_another_destroyed_is_not_kept(session: Session, cloud: FakeCloud) -> None:
    with pytest.raises(ValueError, match="no flag"):
        fail(session, ValueError("no flag"), lambda env: clear_away(session, env), always)
    assert_nothing_is_left(session, cloud)


def test_a_failed_creation_is_cleared_away(session: Session, cloud: FakeCloud) -> None:
    def create(session: Session, env: Environment) -> Environment:
        raise ValueError("no capacity")

    with pytest.raises(ValueError, match="no capacity"), launch(session, create=create):
        pytest.fail("the body ran")
    assert_nothing_is_left(session, cloud)


def test_the_body_has_the_lock(session: Session) -> None:
    with launch(session, temporary=True) as env:
        assert is_locked(session.environments.lock(env.id))
    assert not is_locked(session.environments.lock("env"))
