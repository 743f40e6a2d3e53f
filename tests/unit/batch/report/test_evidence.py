"""What is read of each run from the home, and of no other environment."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest

from provisioner.base.models import Environment, MachineRecord, MachineSize, TaskSetup
from provisioner.batch.report import evidence
from provisioner.batch.report.evidence import READ_BYTES, gather, is_own
from provisioner.store.environments import EnvironmentStore, derived_id
from provisioner.store.home import Home
from tests.unit.batch.report.samples import BEGIN, row
from tests.unit.recording.proofs import write

BATCH = "nightly-k7x2"
OWN = derived_id("guess", "easy", f"{BATCH}/guess/easy/solver/1/2")


@pytest.fixture
def store(tmp_path: Path) -> EnvironmentStore:
    home = Home(tmp_path / "home")
    home.make()
    return EnvironmentStore(home)


def kept(store: EnvironmentStore, identity: str = OWN) -> Environment:
    size = MachineSize(cpus=2, memory_gib=4, disk_gib=16)
    machines = {
        "aux": MachineRecord(image="i", size=size, user="root"),
        "primary": MachineRecord(image="i", size=size, user="root", distribution="debian-12"),
    }
    return store.save(
        Environment(
            id=identity, cloud="local", stack="stack", family="guess", task="easy", status="ready", created_at=BEGIN,
            expires_at=BEGIN + timedelta(hours=1), setup=TaskSetup(instructions="Guess."), full_internet=False,
            machines=machines, versions={"accelerator": "TCG"},
        )
    )  # fmt: skip


@pytest.mark.parametrize("archived", [False, True], ids=["live", "archived"])
def test_all_that_was_kept_of_a_run_is_found(store: EnvironmentStore, archived: bool) -> None:
    environment = kept(store)
    logs = store.logs(OWN)
    for name, text in (("agent.log", "hello"), ("submission.txt", "42"), ("start.log", " "), ("score.log", "KeyError")):
        (logs / name).write_text(text)
    proof = write(logs, environment=OWN)
    if archived:
        store.archive(environment)
    run = row(1, environment=OWN, attempts=2, outcome="task_failed")
    found = gather(store, BATCH, [run])[run.key]
    assert (found.instructions, found.submission, found.agent_output) == ("Guess.", "42", "hello")
    assert (found.log_name, found.log, found.internet) == ("score.log", "KeyError", False)
    assert (found.isolation, found.isolation_line) == (proof.compact(), proof.line())
    assert found.versions == {"accelerator": "TCG"}
    assert found.machines == {"primary": "2 CPUs, 4 GiB, debian-12", "aux": "2 CPUs, 4 GiB"}


def test_the_end_of_the_recorded_calls_is_found(store: EnvironmentStore) -> None:
    kept(store)
    call = {
        "at": "T1",
        "machine": "primary",
        "user": "agent",
        "operation": "start",
        "argv": ["id", "-u"],
        "exit_code": 0,
    }
    rows = [json.dumps(call | {"at": f"T{number}", "seconds": 0.5}) for number in range(5000)]
    (store.logs(OWN) / "calls.jsonl").write_text("\n".join([*rows, "{", "[1]", '{"at": 1, "x": "\x1b[2J"}']))
    run = row(1, environment=OWN, attempts=2)
    found = gather(store, BATCH, [run])[run.key]
    assert found.calls.endswith("T4999  agent@primary  exit 0  0.5 s  start id -u")
    assert len(found.calls) <= READ_BYTES


def test_a_row_shows_no_environment_but_one_of_its_own(store: EnvironmentStore) -> None:
    kept(store, "somebody-elses")
    for environment, attempts in (("somebody-elses", 1), ("../archive", 1), (OWN, 1), ("", 1), (OWN, 0)):
        assert not is_own(BATCH, row(1, environment=environment, attempts=attempts))
        assert gather(store, BATCH, [row(1, environment=environment, attempts=attempts)]) == {}
    assert is_own(BATCH, row(1, environment=OWN, attempts=2))
    assert not is_own("another-batch", row(1, environment=OWN, attempts=2))


def test_a_run_of_another_home_shows_what_there_is(store: EnvironmentStore) -> None:
    run = row(1, environment=OWN, attempts=2)
    assert gather(store, BATCH, [run])[run.key].submission is None
    kept(store)
    (store.directory(OWN) / "environment.json").write_text("{")
    (store.logs(OWN) / "agent.log").write_bytes(b"x" * (READ_BYTES + 9) + b"\xff")
    found = gather(store, BATCH, [run])[run.key]
    assert (found.instructions, found.internet) == ("", None)
    assert len(found.agent_output) == READ_BYTES
    assert found.agent_output.endswith("x\ufffd")


def test_of_many_runs_less_is_read_of_each(store: EnvironmentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    kept(store)
    for name in ("agent.log", "submission.txt", "score.log"):
        (store.logs(OWN) / name).write_text("x" * 9000)
    run = row(1, environment=OWN, attempts=2, outcome="task_failed")
    monkeypatch.setattr(evidence, "TOTAL_BYTES", evidence.TEXTS * 100 * 10)
    found = gather(store, BATCH, [run, *(row(number) for number in range(2, 101))])[run.key]
    assert [len(text or "") for text in (found.agent_output, found.submission, found.log)] == [10, 10, 10]
    assert found.instructions == "Guess."
