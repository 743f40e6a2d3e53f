"""Tests the commands `replay` and `verify`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from provisioner.base.clock import now
from provisioner.base.models import Environment, Outcome
from provisioner.base.redaction import Redactor
from provisioner.cli.commands import replay
from provisioner.machines.recordings import facts_of
from provisioner.recording.calls import Call, CallLog
from provisioner.recording.casts import Cast
from provisioner.recording.manifest import seal
from provisioner.store.environments import EnvironmentStore
from provisioner.store.files import write_atomically
from tests.unit.conftest import CommandLine
from tests.unit.fakes.world import environment


@pytest.fixture
def ended(store: EnvironmentStore) -> Environment:
    """A destroyed environment with two recorded terminals, a call and its sealed logs."""
    outcome = Outcome(status="scored", score=1.0, scored_at=now())
    env = store.save(environment("echo-main-bcd234", outcome=outcome, recorded=True))
    logs = store.logs(env.id)
    with Cast(logs, "agent", Redactor({}), "bash solve.sh") as cast:
        cast.output("working\n")
        cast.output("solved\n")
    with Cast(logs, "terminal", Redactor({}), "vi") as cast:
        cast.show(b"\x1b[2J\x1b]52;c;AAAA\x07edited\r\n")
    with CallLog(logs, "primary").recorded(Call("execute", "agent", ["cat", "/flag"])) as call:
        call.exit_code = 0
    env = env.model_copy(update={"recording": seal(logs, facts_of(env), write_atomically)})
    store.archive(env)
    return env


def test_terminals_are_replayed_without_control_sequences(provisioner: CommandLine, ended: Environment) -> None:
    done = provisioner("replay", ended.id)
    assert done.code == 0
    assert done.stdout.startswith("==> agent-1: bash solve.sh <==\nworking\nsolved\n\n==> terminal-1: vi <==\n")
    assert "edited\n" in done.stdout
    assert "\x1b" not in done.stdout
    assert "\x07" not in done.stdout


def test_one_part_is_replayed_or_listed(provisioner: CommandLine, ended: Environment) -> None:
    assert provisioner("replay", ended.id, "--part", "agent-1").stdout == (
        "==> agent-1: bash solve.sh <==\nworking\nsolved\n\n"
    )
    calls = provisioner("replay", ended.id, "--part", "calls").stdout
    assert "agent@primary  exit 0" in calls
    assert calls.endswith("execute cat /flag\n")
    refused = provisioner("replay", ended.id, "--part", "../environment")
    assert (refused.code, "It has: agent-1, terminal-1, calls." in refused.stderr) == (2, True)


def test_a_reader_that_has_gone_is_no_damage(
    provisioner: CommandLine, ended: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def show(_: str) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(replay, "show", show)
    for part in ([], ["--part", "calls"]):
        done = provisioner("replay", ended.id, *part)
        assert (done.code, done.stdout, done.stderr) == (1, "", "")


def test_programs_get_what_was_recorded_as_it_was(provisioner: CommandLine, ended: Environment) -> None:
    [agent, terminal] = provisioner("replay", ended.id, "--json").json["parts"]
    assert (agent["part"], agent["command"], agent["cut"], agent["damaged"]) == ("agent-1", "bash solve.sh", False, "")
    assert [event[1:] for event in agent["events"]] == [["o", "working\r\n"], ["o", "solved\r\n"]]
    assert "".join(event[2] for event in terminal["events"]) == "\x1b[2J\x1b]52;c;AAAA\x07edited\r\n"
    [calls] = provisioner("replay", ended.id, "--part", "calls", "--json").json["parts"]
    assert calls["rows"][0]["argv"] == ["cat", "/flag"]


def test_programs_get_no_more_than_a_bound(
    provisioner: CommandLine, ended: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "JSON_BYTES", 40)
    [agent, terminal] = provisioner("replay", ended.id, "--json").json["parts"]
    assert (len(agent["events"]), agent["cut"], terminal["events"], terminal["cut"]) == (1, True, [], True)


def test_an_environment_without_a_terminal_says_what_it_has(provisioner: CommandLine, store: EnvironmentStore) -> None:
    env = store.save(environment("echo-main-bcd234"))
    refused = provisioner("replay", env.id)
    assert (refused.code, "has no recording of a terminal" in refused.stderr) == (2, True)


@pytest.mark.parametrize("speed", ["0", "-1", "nan", "inf"])
def test_a_speed_that_is_none_is_refused(provisioner: CommandLine, ended: Environment, speed: str) -> None:
    assert provisioner("replay", ended.id, "--speed", speed).code == 2


def test_pauses_are_as_they_were_but_for_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    for seconds in (0.5, 3, 3600):
        replay._wait(2, seconds)
    assert waited == [0.25, 1.5, 2.0]


def test_a_destroyed_environment_is_verified(provisioner: CommandLine, ended: Environment) -> None:
    done = provisioner("verify", ended.id, "--json")
    assert (done.code, done.json["verified"], done.json["sealed"]) == (0, True, True)
    assert [(each["name"], each["head"], each["files"]) for each in done.json["checked"]] == [
        (ended.id, ended.recording, 3)
    ]


def test_logs_whose_seal_was_removed_are_not_sealed(
    provisioner: CommandLine, store: EnvironmentStore, ended: Environment
) -> None:
    (store.archived_logs(ended.id) / "manifest.json").unlink()
    done = provisioner("verify", ended.id, "--json")
    assert (done.json["verified"], done.json["sealed"]) == (False, False)
    assert provisioner("verify", ended.id).stdout.count("\n") == 1


def test_show_tells_what_was_recorded_and_how_to_replay_it(provisioner: CommandLine, ended: Environment) -> None:
    shown = provisioner("show", ended.id).stdout
    assert "  recorded: agent-1, terminal-1, calls\n" in shown
    assert f"  to replay: provisioner replay {ended.id} --part agent-1\n" in shown
    assert f"  sealed as {ended.recording}\n" in shown
    parts = ["agent-1", "terminal-1", "calls"]
    assert provisioner("show", ended.id, "--json").json["parts"] == parts


def test_show_names_no_more_than_some_of_very_many_parts(provisioner: CommandLine, store: EnvironmentStore) -> None:
    env = store.save(environment("echo-main-bcd234", recorded=True))
    for number in range(25):
        (store.logs(env.id) / f"exec-{number:02}.cast").touch()
    assert "exec-19 and 5 more\n" in provisioner("show", env.id).stdout


def test_an_altered_log_fails_and_is_named(
    provisioner: CommandLine, store: EnvironmentStore, ended: Environment
) -> None:
    log = store.archived_logs(ended.id) / "agent-1.cast"
    log.write_bytes(log.read_bytes().replace(b"solved", b"Solved"))
    done = provisioner("verify", ended.id)
    assert (done.code, done.stdout) == (1, f"{ended.id}: agent-1.cast: its contents have changed\n")
    assert provisioner("verify", ended.id, "--json").json["ok"] is False
    assert provisioner("verify", str(log.parent)).code == 1


def test_an_altered_record_fails(provisioner: CommandLine, store: EnvironmentStore, ended: Environment) -> None:
    path = store.archived_logs(ended.id).parent / "environment.json"
    path.write_text(path.read_text().replace('"task": "main"', '"task": "maim"'))
    assert "environment.json: record is" in provisioner("verify", ended.id).stdout


def test_a_new_seal_over_altered_logs_fails_by_its_hash(
    provisioner: CommandLine, store: EnvironmentStore, ended: Environment, tmp_path: Path
) -> None:
    logs = store.archived_logs(ended.id)
    (logs / "agent-1.cast").unlink()
    seal(logs, facts_of(ended), write_atomically)
    assert "not the one whose hash was published" in provisioner("verify", ended.id).stdout
    results = tmp_path / "run.json"
    results.write_text(json.dumps({"environment": ended.id, "score": 1.0, "recording": ended.recording}))
    told = provisioner("verify", str(results))
    assert "not the one whose hash was published" in told.stdout
    assert f"{results}: no seal beside it, so that missing rows, and outcomes, agents" in told.stdout
    assert provisioner("verify", str(results), "--json").json["sealed"] is False


def test_what_still_exists_or_never_did_cannot_be_verified(provisioner: CommandLine, store: EnvironmentStore) -> None:
    env = store.save(environment("echo-main-bcd234"))
    assert "sealed once it is destroyed" in provisioner("verify", env.id).stderr
    assert provisioner("verify", "nothing").code == 2
    assert provisioner("verify", "").code == 2


def test_without_a_result_nothing_is_verified(provisioner: CommandLine, tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    results.write_text(json.dumps({"environment": "env", "score": None, "recording": ""}))
    done = provisioner("verify", str(results))
    assert (done.code, "Nothing to check" in done.stdout) == (1, True)
