"""Tests that `inspect sandbox cleanup provisioner` destroys what is left, and says what it could not destroy."""

from __future__ import annotations

import pytest
from click.testing import CliRunner, Result
from inspect_ai._cli.sandbox import sandbox_command

from provisioner.base.models import Environment
from provisioner.machines import claims
from provisioner.session import Session
from provisioner.store.environments import RECORD
from provisioner.store.home import UNFINISHED
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.world import environment, up

pytestmark = pytest.mark.usefixtures("configured")


def cleanup(*arguments: str) -> Result:
    return CliRunner().invoke(sandbox_command, ["cleanup", "provisioner", *arguments])


def abandoned(session: Session, identity: str = "env", batch: str = "inspect-eval") -> Environment:
    planned = claims.reserve(session, environment(identity, batch=batch))
    running = up(session, planned)
    session.leases.release(identity)
    return running


def spoil(session: Session, identity: str) -> None:
    (session.environments.directory(identity) / RECORD).write_text("{")


def test_what_evals_have_left_is_destroyed_and_nothing_else(session: Session, cloud: FakeCloud) -> None:
    abandoned(session)
    abandoned(session, "other", batch="a-batch")
    ended = cleanup()
    assert ended.exit_code == 0
    assert "env destroyed\nNo other machines" in ended.output
    assert cloud.existing() == ["other/primary"]


def test_a_snapshot_that_an_eval_was_killed_in_is_removed(session: Session) -> None:
    left = session.home.snapshots / f"{UNFINISHED}forked" / "primary"
    left.mkdir(parents=True)
    ended = cleanup()
    assert ended.exit_code == 0
    assert f"unfinished snapshot {left.parent.name} removed" in ended.output
    assert list(session.home.snapshots.iterdir()) == []


def test_a_snapshot_that_cannot_be_removed_keeps_no_machine(
    session: Session, cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    abandoned(session)
    left = session.home.snapshots / f"{UNFINISHED}forked"
    left.mkdir(parents=True)

    def refuse(path: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("provisioner.store.snapshots.remove_tree", refuse)
    ended = cleanup()
    assert ended.exit_code == 0
    assert "env destroyed" in ended.output
    assert (cloud.existing(), left.is_dir()) == ([], True)


def test_a_failure_is_told_and_is_the_exit_code(session: Session, cloud: FakeCloud) -> None:
    abandoned(session)
    cloud.faults.unreachable = True
    for arguments in ((), ("env",)):
        ended = cleanup(*arguments)
        assert ended.exit_code == 5
        assert "env is NOT destroyed: " in ended.output
        assert "fixed the problem above, run:\n    inspect sandbox cleanup provisioner" in ended.output
        assert "No other machines" not in ended.output
    assert session.environments.exists("env")


def test_one_failure_keeps_no_other_environment_alive(
    session: Session, cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = abandoned(session, "one"), abandoned(session, "two")

    def open_cloud(_home: object, _settings: object, _where: object) -> FakeCloud:
        monkeypatch.setattr("provisioner.inspect.clean_up.open_cloud", lambda *_: cloud)
        raise OSError("no credentials")

    monkeypatch.setattr("provisioner.inspect.clean_up.open_cloud", open_cloud)
    ended = cleanup()
    assert ended.exit_code == 5
    assert "one is NOT destroyed: Unexpected OSError no credentials" in ended.output
    assert cloud.existing() == [f"{first.id}/primary"]


def test_a_damaged_record_is_named_with_what_destroys_it(session: Session) -> None:
    abandoned(session)
    abandoned(session, "other", batch="a-batch")
    spoil(session, "env")
    spoil(session, "other")
    for arguments in ((), ("env",)):
        ended = cleanup(*arguments)
        assert ended.exit_code == 5
        assert "provisioner destroy env" in ended.output
        assert "other" not in ended.output


def test_an_environment_that_is_gone_is_said_to_be(session: Session) -> None:
    abandoned(session)
    assert cleanup("env").exit_code == 0
    ended = cleanup("env")
    assert (ended.exit_code, ended.output) == (0, "env is already gone\n")


@pytest.mark.parametrize(
    ("identity", "said"),
    [("nothing", "There is no environment"), ("other", "is not of an Inspect eval"), ("used", "running eval uses")],
)
def test_what_cannot_be_destroyed_is_a_usage_error(session: Session, identity: str, said: str) -> None:
    abandoned(session, "other", batch="a-batch")
    claims.take_lease(session, abandoned(session, "used"))
    ended = cleanup(identity)
    assert ended.exit_code == 2
    assert said in ended.output
    assert "Traceback" not in ended.output
    session.leases.release("used")
