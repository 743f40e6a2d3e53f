"""Tests that logs and captures are kept, bounded and without secrets, and sealed; no failure prevents destruction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

import pytest

from provisioner.base.clock import now
from provisioner.base.models import Environment, Outcome
from provisioner.clouds.cloud import Capture
from provisioner.machines import recordings
from provisioner.machines.destroy import clear_away
from provisioner.machines.recordings import keep_journals, keep_logs, sealed
from provisioner.recording import manifest, packets
from provisioner.recording.published import check_directory
from provisioner.session import Session
from provisioner.version import __version__
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.world import created, environment, told_of, up
from tests.unit.recording.proofs import write
from tests.unit.recording.test_packets import HEADER, record


@pytest.fixture
def recorded(session: Session, cloud: FakeCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    """An environment with two machines, what their link carried, and a score."""
    env = up(session, environment(roles=("primary", "aux"), recorded=True))
    capture = tmp_path / "link.pcap"
    capture.write_bytes(HEADER + record(b"first") + record(b"second") + b"half of a packet")
    found = [Capture("primary", "link", capture), Capture("aux", "link", tmp_path / "gone.pcap")]
    monkeypatch.setattr(cloud, "captures", lambda _: found)
    outcome = Outcome(status="scored", score=1.0, scored_at=now())
    return session.environments.update(env, outcome=outcome)


def destroyed(session: Session, env: Environment) -> tuple[Environment, Path]:
    clear_away(session, env)
    assert session.cloud.remaining(env) == []
    assert not session.environments.directory(env.id).exists()
    return session.environments.find(env.id, archived=True), session.environments.archived_logs(env.id)


def test_calls_and_captures_are_sealed(session: Session, recorded: Environment) -> None:
    keep_journals(session, recorded)
    archived, logs = destroyed(session, recorded)
    sealed = manifest.load(logs)
    assert archived.recording == sealed.head
    assert manifest.problems(logs, sealed) == []
    names = {entry.name for entry in sealed.entries}
    assert names >= {"calls.jsonl", "primary-link.pcap", "console-primary.log"}
    assert sealed.facts["score"] == 1.0
    assert sealed.facts["images"] == {"primary": "base", "aux": "base"}
    assert sealed.facts["record"] == recordings.record_hash(archived)
    assert sealed.facts["versions"] == archived.versions == {"provisioner": __version__, "Terraform": "1.11.4"}
    assert archived.gone_at is not None
    assert sealed.facts["gone_at"] == archived.gone_at.isoformat()
    calls = [json.loads(line) for line in (logs / "calls.jsonl").read_text().splitlines()]
    assert {(call["machine"], call["argv"][0]) for call in calls} == {("aux", "journalctl"), ("primary", "journalctl")}
    capture = (logs / "primary-link.pcap").read_bytes()
    assert [packet.frame for packet in packets.packets(capture)] == [b"first", b"second"]
    assert any("gone.pcap" in note for note in told_of(session).notes)


def test_a_kill_while_archiving_keeps_the_seal(
    session: Session, recorded: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(_: Path) -> NoReturn:
        (session.environments.directory(recorded.id) / "logs" / "console-primary.log").unlink()
        raise KeyboardInterrupt

    keep_journals(session, recorded)
    with monkeypatch.context() as patch:
        patch.setattr("provisioner.store.environments.remove_tree", killed)
        with pytest.raises(KeyboardInterrupt):
            clear_away(session, recorded)
    before = manifest.load(session.environments.archived_logs(recorded.id))
    archived, logs = destroyed(session, session.environments.find(recorded.id))
    assert archived.recording == manifest.load(logs).head == before.head
    assert check_directory("env", logs, archived.recording, {"record": recordings.record_hash(archived)}).problems == ()


def test_what_a_killed_write_has_left_is_not_archived(session: Session, recorded: Environment) -> None:
    (session.environments.logs(recorded.id) / ".agent.log.x1y2").touch()
    archived, logs = destroyed(session, recorded)
    assert check_directory("env", logs, archived.recording).problems == ()


def test_without_recording_the_logs_are_as_ever_and_sealed(session: Session, cloud: FakeCloud) -> None:
    env = up(session, environment(recorded=False))
    keep_journals(session, env)
    archived, logs = destroyed(session, env)
    assert {path.name for path in logs.iterdir()} == {
        *("console-primary.log", "journal-primary.log", "terraform.log", "manifest.json")
    }
    assert archived.recording == manifest.load(logs).head


@pytest.mark.parametrize("part", ["captures", "packets", "seal", "facts"])
@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), MemoryError(), RuntimeError("?")], ids=["disk", "memory", "bug"]
)
def test_no_failure_keeps_anything_from_being_destroyed(
    session: Session, recorded: Environment, monkeypatch: pytest.MonkeyPatch, part: str, error: Exception
) -> None:
    def fails(*_: Any, **__: Any) -> NoReturn:
        raise error

    targets = {
        "captures": (session.cloud, "captures"),
        "packets": (packets, "set_right"),
        "seal": (manifest, "seal"),
        "facts": (recordings, "facts_of"),
    }
    monkeypatch.setattr(*targets[part], fails)
    archived, _ = destroyed(session, recorded)
    assert bool(archived.recording) == (part in ("captures", "packets"))
    assert any(type(error).__name__ in note for note in told_of(session).notes)


def test_a_records_hash_is_the_same_in_later_versions() -> None:
    env = environment()
    again = Environment.model_validate_json(env.model_dump_json())
    assert recordings.record_hash(again) == recordings.record_hash(env)
    with_head = env.model_copy(update={"recording": "0" * 64})
    assert recordings.record_hash(with_head) == recordings.record_hash(env)
    assert recordings.record_hash(env.model_copy(update={"agent_exit_code": 1})) != recordings.record_hash(env)


def test_the_proof_of_isolation_is_sealed_with_its_verdict(session: Session, recorded: Environment) -> None:
    proof = write(session.environments.logs(recorded.id))
    archived, logs = destroyed(session, recorded)
    sealed = manifest.load(logs)
    assert "isolation.json" in {entry.name for entry in sealed.entries}
    assert sealed.facts["isolation"] == proof.facts()
    checked = check_directory("env", logs, archived.recording)
    assert (checked.isolation, checked.problems) == (proof.line(), ())


def test_a_proof_that_is_damaged_keeps_nothing_from_being_sealed(session: Session, recorded: Environment) -> None:
    (session.environments.logs(recorded.id) / "isolation.json").write_text("{")
    archived, logs = destroyed(session, recorded)
    assert archived.recording
    assert manifest.load(logs).facts["isolation"] is None


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
