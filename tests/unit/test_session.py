"""What a command's context gives: one ledger, one redactor, and phases that are timed."""

from __future__ import annotations

import pytest

from provisioner.base.errors import HostError, raised_in
from provisioner.costs.ledger import Ledger
from provisioner.recording import casts
from provisioner.session import Phases, Session
from tests.unit.fakes.world import environment, told_of


def test_stores_are_those_of_the_home_and_made_once(session: Session) -> None:
    session.environments.save(environment())
    assert (session.home.environments / "env" / "environment.json").exists()
    assert session.environments is session.environments
    assert session.images.all() == []
    assert isinstance(session.ledger, Ledger)
    assert session.ledger is session.ledger


def test_secrets_are_in_no_text_about_a_session(session: Session) -> None:
    assert "s3cret-value" not in repr(session)
    assert session.redactor.redact("s3cret-value") == "[redacted:TOKEN]"


def test_output_goes_to_the_listener(session: Session) -> None:
    session.output("a line\n")
    assert told_of(session).texts == ["a line\n"]


def test_phases_are_timed_and_a_failed_one_is_not_finished(session: Session) -> None:
    phases = Phases(session.progress)
    with phases.phase("one"):
        pass
    with pytest.raises(KeyError), phases.phase("two"):
        raise KeyError
    with phases.phase("three"):
        assert told_of(session).phases == ["one", "two...", "three..."]
    assert [phase.name for phase in phases.finished] == ["one", "three"]
    assert all(phase.seconds >= 0 for phase in phases.finished)


def test_an_error_keeps_the_narrowest_phase(session: Session) -> None:
    with pytest.raises(HostError) as raised, Phases(session.progress).phase("images"), raised_in("install"):
        raise HostError("no disk")
    assert raised.value.phase == "install"


def test_a_steady_session_is_the_same_but_for_its_listener(session: Session) -> None:
    ledger = session.ledger
    steady = session.steady()
    steady.progress.note("heard")
    assert told_of(session).notes == ["heard"]
    assert steady.ledger is ledger


def test_a_recording_that_cannot_be_made_is_told(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(casts, "MAXIMUM", 1)
    recorded = environment().model_copy(update={"recorded": True})
    (session.environments.directory("env") / "logs").mkdir(parents=True)
    for _ in range(2):
        with session.cast(recorded, "terminal") as cast:
            cast.show(b"shown")
    assert told_of(session).notes == ["Not recorded: there are 1 recordings of this kind already"]
    assert [path.name for path in session.environments.logs("env").iterdir()] == ["terminal-1.cast"]
