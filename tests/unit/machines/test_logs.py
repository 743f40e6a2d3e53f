"""Tests that logs of machines are kept before they are destroyed, bounded and without secrets."""

from __future__ import annotations

from typing import Any

import pytest

from provisioner.machines.recordings import keep_journals, keep_logs, sealed
from provisioner.session import Session
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.world import created, environment, up


def kept(session: Session) -> dict[str, str]:
    return {path.name: path.read_text() for path in session.environments.logs("env").iterdir()}


def test_consoles_and_terraforms_log_are_kept(session: Session) -> None:
    [env] = created(session, environment())
    keep_logs(session, env, session.environments.live_logs(env.id))
    logs = kept(session)
    assert logs.keys() == {"console-primary.log", "terraform.log"}
    assert logs["console-primary.log"].endswith("console line 19 of primary\n")
    assert '"type": "outputs"' in logs["terraform.log"]


def test_logs_hold_no_secrets(session: Session, cloud: FakeCloud) -> None:
    env = up(session)
    cloud.consoles["primary"] = "the token is s3cret-value\n"
    cloud.machine(env).guest.journal = "s3cret-value was used\n"
    keep_logs(session, env, session.environments.live_logs(env.id))
    keep_journals(session, env)
    assert kept(session)["console-primary.log"] == "the token is [redacted:TOKEN]\n"
    assert kept(session)["journal-primary.log"] == "[redacted:TOKEN] was used\n"


def test_no_log_changes_once_it_is_sealed(session: Session, cloud: FakeCloud) -> None:
    env = up(session)
    sealed(session, env)
    cloud.machine(env).guest.journal = "late\n"
    keep_logs(session, env, session.environments.live_logs(env.id))
    keep_journals(session, env)
    assert [name for name in kept(session) if name.startswith(("console", "journal", "terraform"))] == []


def test_an_empty_console_leaves_no_file(session: Session, cloud: FakeCloud) -> None:
    env = session.environments.save(environment())
    cloud.consoles["primary"] = ""
    keep_logs(session, env, session.environments.live_logs(env.id))
    assert kept(session) == {}


def test_no_log_is_kept_for_an_environment_without_a_directory(session: Session) -> None:
    keep_logs(session, environment(), session.environments.live_logs("env"))
    assert not session.environments.directory("env").exists()


def test_journals_of_machines_that_cannot_be_reached_are_skipped(session: Session, cloud: FakeCloud) -> None:
    env = up(session, environment(roles=("primary", "aux")))
    cloud.end_machine(env, "primary")
    keep_journals(session, env)
    assert kept(session).keys() == {"journal-aux.log"}
    cloud.machine(env, "aux").sshd.authorize = lambda _user, _key: False
    (session.environments.logs("env") / "journal-aux.log").unlink()
    keep_journals(session, env)
    assert kept(session) == {}


def test_the_journal_is_skipped_if_the_cloud_cannot_be_reached(session: Session, cloud: FakeCloud) -> None:
    env = up(session)
    cloud.faults.unreachable = True
    keep_journals(session, env)
    assert kept(session) == {}


def test_a_journal_that_is_too_long_loses_its_middle(session: Session, cloud: FakeCloud) -> None:
    env = up(session)
    cloud.machine(env).guest.journal = "begin\n" + "x" * (3 << 20) + "\nend\n"
    keep_journals(session, env)
    journal = kept(session)["journal-primary.log"]
    assert journal.startswith("begin\n")
    assert journal.endswith("\nend\n")
    assert len(journal) < (2 << 20) + 100


def test_a_full_disk_keeps_no_log_and_raises_nothing(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    env = session.environments.save(environment())

    def full(*_: Any) -> Any:
        raise OSError("No space left on device")

    monkeypatch.setattr("provisioner.machines.recordings.write_atomically", full)
    keep_logs(session, env, session.environments.live_logs(env.id))
    assert kept(session) == {}
