"""The batch commands, as far as they go without a machine."""

from __future__ import annotations

import json
import re
import shutil
from decimal import Decimal
from pathlib import Path
from typing import NoReturn

import pytest
import yaml

from provisioner.base.clock import now
from provisioner.base.errors import InfrastructureError, StillThereError, UsageError
from provisioner.batch.context import BatchContext, TaskForecast
from provisioner.batch.queue import QueueClient, RunState, State
from provisioner.batch.records import Batch, Batches
from provisioner.batch.rows import failed_row
from provisioner.batch.suite import Run, load_suite
from provisioner.cli.commands.batch import cancel, lookup
from provisioner.cli.commands.batch import run as run_command
from provisioner.cli.commands.batch.plan import plan_result, within
from provisioner.clouds.local.cloud import LocalCloud
from provisioner.environment.planning import forecast
from provisioner.family.check import Checked
from provisioner.session import Session
from provisioner.store.environments import RECORD, derived_id
from provisioner.store.home import Home
from tests.command_line import ROOT
from tests.unit.batch import samples
from tests.unit.batch.samples import run
from tests.unit.conftest import CommandLine, nothing_was_created
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.world import family

SUITE = ROOT / "examples" / "batch" / "suite.yaml"


def save_own(provisioner: CommandLine, *runs: Run) -> Batch:
    """Saves a batch with a queue of its own, which is new."""
    home = Home(provisioner.home)
    home.make()
    batch = samples.batch(*runs, id="own-1", suite=load_suite(SUITE), suite_file=str(SUITE), created_at=now())
    Batches(home).save(batch)
    return batch


def test_the_published_schema_is_that_of_suite_files(provisioner: CommandLine) -> None:
    published = (ROOT / "docs" / "suite.schema.json").read_text()
    assert provisioner("batch", "schema").json == json.loads(published)


def test_the_documented_suite_is_valid(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "reference" / "suite-file.md").read_text()
    (tmp_path / "suites" / "agents" / "solver").mkdir(parents=True)
    (tmp_path / "families").mkdir()
    shutil.copytree(ROOT / "examples" / "number_guess", tmp_path / "families" / "number_guess")
    (tmp_path / "suites" / "suite.yaml").write_text(text.partition("```yaml\n")[2].partition("```")[0])
    (tmp_path / "suites" / "secrets.env").write_text("")
    assert load_suite(tmp_path / "suites" / "suite.yaml").name == "nightly"


def test_a_plan_says_what_would_run_and_creates_nothing(provisioner: CommandLine) -> None:
    planned = provisioner("batch", "plan", str(SUITE), "--json").json
    assert (planned["runs"], planned["concurrency"], planned["worst_usd"]) == (12, 2, 0)
    shown = provisioner("batch", "plan", str(SUITE))
    assert shown.code == 0
    assert "12 runs on local, 2 at once" in shown.stdout
    assert "Costs nothing" in shown.stdout
    assert "USD" not in shown.stdout
    # Its image is not built yet, so it may have aux VMs.
    assert "At most 2 environments exist at once, with at least" in shown.stdout


def test_a_plan_counts_the_environments_that_exist_at_once(provisioner: CommandLine, tmp_path: Path) -> None:
    guess = {"path": str(ROOT / "examples" / "number_guess"), "tasks": ["easy"]}
    data = {"name": "s", "families": [guess], "submissions": [{"name": "one", "text": "1"}], "concurrency": 5}
    path = tmp_path / "suite.yaml"
    memory = {}
    for repetitions, at_once in ((10, 5), (1, 1)):
        path.write_text(yaml.safe_dump({**data, "repetitions": repetitions}))
        planned = provisioner("batch", "plan", str(path), "--json").json
        assert (planned["concurrency"], planned["environments_at_once"]) == (5, at_once)
        memory[at_once] = planned["memory_gib_at_once"]
        shown = provisioner("batch", "plan", str(path)).stdout
        assert "5 at once" in shown
    assert memory[5] == 5 * memory[1] > 0
    assert "At most 1 environment exists at once" in shown


@pytest.mark.parametrize(("capacity", "concurrency"), [(None, 8), (9, 8), (8, 8), (3, 3), (0, 1)])
def test_a_batch_runs_at_least_one_environment_and_what_fits(capacity: int | None, concurrency: int) -> None:
    suite = load_suite(SUITE).model_copy(update={"concurrency": 8})
    assert within(suite, capacity).concurrency == concurrency


@pytest.mark.parametrize("capacity", [0, 1])
def test_a_plan_tells_that_there_is_not_enough_room_and_in_what(
    provisioner: CommandLine, monkeypatch: pytest.MonkeyPatch, capacity: int
) -> None:
    monkeypatch.setattr(LocalCloud, "capacity", lambda *_: capacity)
    shown = provisioner("batch", "plan", str(SUITE)).stdout
    assert f"this host has room for {capacity} of 2 environments now" in shown
    assert "`batch run` without --database runs at most 1 at once." in shown
    assert provisioner("batch", "plan", str(SUITE), "--json").json["capacity"] == capacity
    monkeypatch.setattr(LocalCloud, "capacity", lambda *_: 2)
    assert "has room" not in provisioner("batch", "plan", str(SUITE)).stdout


def test_a_local_batch_begins_with_what_fits_into_memory(
    provisioner: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [run(repetition=number) for number in (1, 2)]
    monkeypatch.setattr("provisioner.clouds.local.sizing.available_memory_gib", lambda: 1.9)
    monkeypatch.setattr(BatchContext, "prepare", lambda _: runs)
    begun: list[Batch] = []

    def run_batch(batch: Batch, _: BatchContext) -> NoReturn:
        begun.append(batch)
        raise UsageError("it would run")

    monkeypatch.setattr(run_command, "run_batch", run_batch)
    assert "room for 1 of 2 environments now" in provisioner("batch", "run", str(SUITE)).stderr
    database = ["--database", "postgresql://u@h/d"]  # other controllers have memory of their own
    assert "has room" not in provisioner("batch", "run", str(SUITE), *database).stderr
    assert [batch.suite.concurrency for batch in begun] == [1, 2]


def test_a_plan_gives_no_count_for_unknown_tasks(provisioner: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "unknown").mkdir()
    module = "class TaskFamily:\n    @staticmethod\n    def get_tasks():\n        return dict()\n"
    (tmp_path / "unknown" / "unknown.py").write_text(module)
    guess = {"path": str(ROOT / "examples" / "number_guess"), "tasks": ["easy"]}
    data = {"name": "s", "families": [{"path": "unknown"}, guess], "submissions": [{"name": "one", "text": "1"}]}
    path = tmp_path / "suite.yaml"
    path.write_text(yaml.safe_dump(data))
    planned = provisioner("batch", "plan", str(path), "--json").json
    assert [task["runs"] for task in planned["tasks"]] == [None, 1]
    assert (planned["runs"], planned["worst_usd"], planned["worst_with_retries_usd"]) == (None, None, None)
    shown = provisioner("batch", "plan", str(path)).stdout
    assert "At least 1 run on local" in shown
    assert "Costs nothing" not in shown
    # Nor is nothing said to be a lot of memory.
    path.write_text(yaml.safe_dump({**data, "families": [{"path": "unknown"}]}))
    shown = provisioner("batch", "plan", str(path)).stdout
    assert "At most 2 environments exist at once.\n" in shown


def test_a_plan_says_at_least_while_an_aux_vm_is_not_known(session: Session, cloud: FakeCloud, tmp_path: Path) -> None:
    cloud.usd = Decimal(3)
    for has_aux_vm, least in ((None, True), (False, False)):
        estimate = forecast(session, family(tmp_path), "main", Checked("fam", has_aux_vm=has_aux_vm))
        task = TaskForecast(family="fam", task="main", runs=2, forecast=estimate)
        shown = plan_result(load_suite(SUITE), [task]).text
        assert "1,000 runs of this mix: about" in shown
        assert (f" At least {estimate.worst_micro_usd * 2 // 10**6}." in shown, "Aux VMs of" in shown) == (least, least)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"concurrency": 0}, "concurrency"),
        ({"families": [{"path": str(ROOT / "examples" / "number_guess"), "tasks": ["simple"]}]}, "no task 'simple'"),
    ],
    ids=["file", "task"],
)
def test_a_bad_suite_is_refused_before_anything_is_created(
    provisioner: CommandLine, tmp_path: Path, change: dict[str, object], said: str
) -> None:
    guess = {"path": str(ROOT / "examples" / "number_guess"), "tasks": ["easy"]}
    data = {"name": "bad", "submissions": [{"name": "one", "text": "1"}], "families": [guess]}
    path = tmp_path / "suite.yaml"
    path.write_text(yaml.safe_dump(data | change))
    done = provisioner("batch", "plan", str(path))
    assert done.code == 2
    assert said in done.stderr
    assert nothing_was_created(provisioner.home)


@pytest.mark.parametrize("command", ["status", "resume", "cancel", "report", "export --inspect"])
def test_a_batch_that_there_is_not_is_an_error(provisioner: CommandLine, command: str) -> None:
    done = provisioner("batch", *command.split(), "nothing")
    assert done.code == 2
    assert "There is no batch 'nothing'" in done.stderr


def test_without_batches_there_is_nothing_to_list(provisioner: CommandLine) -> None:
    assert "No batch was run yet" in provisioner("batch", "status").stdout


def test_a_worker_needs_a_database(provisioner: CommandLine) -> None:
    done = provisioner("batch", "worker")
    assert (done.code, "--database" in done.stderr) == (2, True)


def test_a_worker_says_what_it_needs_to_offer(provisioner: CommandLine, tmp_path: Path) -> None:
    database = ("--database", "postgresql://nobody:secret@127.0.0.1:1/nothing")
    done = provisioner("batch", "worker", *database)
    assert (done.code, "--families" in done.stderr) == (2, True)
    done = provisioner("batch", "worker", *database, "--families", str(tmp_path / "missing"))
    assert (done.code, "is not a directory" in done.stderr) == (2, True)
    done = provisioner("batch", "worker", *database, "--families", str(tmp_path), "--allow", "nonsense")
    assert (done.code, "must have the form" in done.stderr) == (2, True)


@pytest.mark.parametrize("arguments", [("batch", "worker"), ("batch", "status"), ("costs",)])
def test_what_is_no_database_is_a_mistake_in_the_command(
    provisioner: CommandLine, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.setenv("PROVISIONER_DATABASE", "sqlite:///x")
    done = provisioner(*arguments)
    assert done.code == 2
    assert "must begin with postgresql://" in done.stderr


def test_costs_as_csv_have_their_names_even_without_any(provisioner: CommandLine) -> None:
    assert provisioner("costs", "--csv").stdout.startswith("environment,kind,cloud")
    assert provisioner("costs", "--csv", "--by", "batch").stdout.startswith("group,launches,reserved_usd")


def test_a_database_that_does_not_answer_is_one_clear_error(provisioner: CommandLine, tmp_path: Path) -> None:
    database = "postgresql://nobody:secret@127.0.0.1:1/nothing"
    done = provisioner("batch", "worker", "--families", str(tmp_path), "--database", database)
    assert done.code == 5
    assert "cannot be reached" in done.stderr
    assert "secret" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_batch_with_its_own_file_needs_no_database(provisioner: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    save_own(provisioner, run())
    monkeypatch.setenv("PROVISIONER_DATABASE", "postgresql://nobody@127.0.0.1:1/nothing")
    told = provisioner("batch", "status", "own")
    assert (told.code, told.stderr) == (0, "")
    assert "0/1 ended" in told.stdout
    assert provisioner("batch", "cancel", "own").code == 0


def test_cancelled_runs_have_not_ended(provisioner: CommandLine) -> None:
    runs = [run(repetition=number) for number in (1, 2)]
    batch, batches = save_own(provisioner, *runs), Batches(Home(provisioner.home))
    lost = failed_row(runs[0], "it broke")
    batches.write_results(batch, [lost, lost.model_copy(update={"key": runs[1].key, "outcome": "cancelled"})])
    damaged = batch.model_copy(update={"id": "broken-1"})
    batches.save(damaged)
    (batches.directory("broken-1") / "results.jsonl").write_text("{}\n")
    listed = provisioner("batch", "status").stdout
    assert re.search("own-1 +1/2 ", listed)
    assert re.search(r"broken-1 +\?/2 ", listed)
    # Its engine's file is not there, so that the rows that were written are all there are.
    reported = provisioner("batch", "report", "own", "--json").json
    assert reported["ended"] == 2
    assert "it broke" in Path(reported["report"]).read_text()
    assert len(batches.results(batch)) == 2


class Queue:
    """A batch's queue, in which some of its runs are."""

    def __init__(self, **states: State) -> None:
        self.by_key = {key: RunState(key=key, state=state) for key, state in states.items()}
        self.cancelled: list[str] = []

    def states(self, _batch: str) -> dict[str, RunState]:
        return self.by_key

    def outputs(self, _batch: str, _keys: object) -> dict[str, object]:
        return {}

    def cancel(self, _batch: str, keys: list[str]) -> None:
        self.cancelled += keys

    def close(self) -> None:
        pass


@pytest.fixture
def own(provisioner: CommandLine) -> Batch:
    """A batch with its own queue, whose runs are named a to e."""
    batch = save_own(provisioner, *(run().model_copy(update={"key": key}) for key in "abcde"))
    (Batches(Home(provisioner.home)).directory(batch.id) / "engine.sqlite").touch()
    return batch


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    queue = Queue(a="queued", b="running", c="cancelled", d="done")
    monkeypatch.setattr(lookup, "open_client", lambda *_: queue)
    monkeypatch.setattr(cancel, "open_client", lambda *_: queue)
    return queue


def test_what_a_worker_stopped_is_cancelled_again(provisioner: CommandLine, own: Batch, queue: Queue) -> None:
    """Else it would requeue the run: see test_worker.py."""
    assert provisioner("batch", "cancel", own.id).code == 0
    assert "c" in queue.cancelled


@pytest.mark.parametrize(("force", "more"), [((), ""), (("--force",), "b")], ids=["gently", "force"])
def test_runs_that_are_not_queued_yet_are_cancelled_too(
    provisioner: CommandLine, own: Batch, queue: Queue, force: tuple[str, ...], more: str
) -> None:
    done = provisioner("batch", "cancel", own.id, *force, "--json").json
    assert set(done["cancelled"]) == {"a", "e", *more}
    assert Batches(Home(provisioner.home)).noted_cancelled(own) == {"a", "c", "e", *more}
    assert set(queue.cancelled) == {"a", "c", *more}  # the controller cancels what comes later


def test_an_unreadable_record_of_a_cancelled_batch_is_named(provisioner: CommandLine, own: Batch, queue: Queue) -> None:
    home = Home(provisioner.home)
    identity = derived_id("a", "main", f"{own.id}/a/2")
    for name in (identity, "foreign"):
        (home.environments / name).mkdir(parents=True)
        (home.environments / name / RECORD).write_text("{")
    done = provisioner("batch", "cancel", own.id, "--force")
    assert done.code == StillThereError.exit_code
    assert f"provisioner destroy {identity}" in done.stderr
    assert "foreign" not in done.stderr


def test_runs_that_have_ended_are_not_cancelled_without_a_queue(provisioner: CommandLine, own: Batch) -> None:
    batches = Batches(Home(provisioner.home))
    (batches.directory(own.id) / "engine.sqlite").unlink()
    batches.write_results(own, [failed_row(run, "it broke") for run in own.runs])
    assert provisioner("batch", "cancel", own.id, "--json").json["cancelled"] == []
    assert batches.noted_cancelled(own) == set()


def test_a_batch_without_a_queue_is_cancelled_by_a_note(provisioner: CommandLine, own: Batch) -> None:
    batches = Batches(Home(provisioner.home))
    (batches.directory(own.id) / "engine.sqlite").unlink()
    assert provisioner("batch", "cancel", own.id).code == 0
    assert batches.noted_cancelled(own) == set("abcde")


def test_the_queue_is_found_once_its_controller_has_made_it(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = samples.batch(run("guess", 1), id="s-1")
    key = batch.runs[0].key
    states = {key: RunState(key=key, state="running")}
    Batches(session.home).save(batch)
    monkeypatch.setattr(lookup, "now", lambda: samples.AT)
    assert lookup.states_and_rows(session.home, batch, "") == ({}, [])
    (Batches(session.home).directory(batch.id) / "engine.sqlite").touch()
    assert lookup.states_and_rows(session.home, batch, "") == ({}, [])  # it has no tables yet
    monkeypatch.undo()
    with pytest.raises(InfrastructureError):
        lookup.states_and_rows(session.home, batch, "")  # it is old, and its queue is damaged
    monkeypatch.setattr(QueueClient, "states", lambda *_: states)
    assert lookup.states_and_rows(session.home, batch, "") == (states, [])
