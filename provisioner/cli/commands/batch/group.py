"""The commands of the group `batch`: run, plan, status, watch, resume, cancel, report and others."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from provisioner.base.clock import now
from provisioner.base.config import load_settings
from provisioner.base.errors import InfrastructureError, ProvisionerError, StillThereError, UsageError
from provisioner.batch.context import BatchContext, batch_costs
from provisioner.batch.offers import Offer
from provisioner.batch.records import Batch, Batches
from provisioner.batch.rows import unreadable_of
from provisioner.batch.suite import load_suite
from provisioner.batch.suite import schema as suite_schema
from provisioner.batch.worker import open_client
from provisioner.cli.command import command, progress
from provisioner.cli.commands.batch.export import export
from provisioner.cli.commands.batch.lookup import (
    BatchArgument,
    DatabaseOption,
    batch_ids,
    ended,
    find_batch,
    has_controller,
    states_and_rows,
)
from provisioner.cli.commands.batch.plan import plan_result, too_many, within
from provisioner.cli.commands.batch.results import summary_data, write_report
from provisioner.cli.commands.batch.running import run_batch, run_worker
from provisioner.cli.commands.batch.view import row_line, summary
from provisioner.cli.commands.batch.watch import watch
from provisioner.cli.home import default_home
from provisioner.cli.options import DATABASE_VARIABLE, AllowOption, NoRecordOption, parse_path
from provisioner.cli.output import Result, table
from provisioner.cli.sessions import session, session_of
from provisioner.environment import lifecycle
from provisioner.environment.allowlist import parse_destination
from provisioner.store.environments import new_id
from provisioner.store.files import is_locked
from provisioner.store.home import Home
from provisioner.version import __version__

SuiteArgument = Annotated[
    Path, typer.Argument(metavar="SUITE", help="The suite file (YAML).", show_default=False, parser=parse_path)
]


def register(app: typer.Typer) -> None:
    """Adds the commands, as a group."""
    group = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
    app.add_typer(group, name="batch")
    command(group, "run", help="Run a suite to its end.")(run)
    command(group, "plan", help="Show what a suite would run, and what it costs at most. Creates nothing.")(plan)
    command(group, "status", help="Show how far a batch has come; without one, list all.")(status)
    command(group, "watch", help="Show a batch live that another terminal works on. Changes nothing.")(watch)
    command(group, "resume", help="Continue a batch that was interrupted, killed or cancelled.")(resume)
    command(group, "cancel", help="Start no more runs of a batch; with --force, stop the active ones.")(cancel)
    command(group, "report", help="Write a batch's report: one HTML page.")(report)
    command(group, "export", help="Write a batch's results in another program's format.")(export)
    command(group, "worker", help="Work on the runs of all batches in a shared database, until interrupted.")(worker)
    command(group, "schema", help="Print the JSON Schema of suite files.")(schema)


def schema() -> Result:
    """Returns the JSON Schema of suite files."""
    return Result(suite_schema(), json.dumps(suite_schema(), indent=2))


def plan(suite: SuiteArgument) -> Result:
    """Describes what a suite would run, and its worst case."""
    loaded = load_suite(suite)
    directory = suite.absolute().parent
    context = BatchContext(default_home(), load_settings(), loaded, directory, "plan", progress=progress())
    tasks = context.forecasts()
    return plan_result(loaded, tasks, context.capacity(tasks), context.session.cloud.scarcity)


def run(suite: SuiteArgument, no_record: NoRecordOption = False, database: DatabaseOption = "") -> Result:
    """Builds the images, and then works on all runs of a suite."""
    loaded = load_suite(suite)
    if no_record:
        loaded = loaded.model_copy(update={"record": False})
    home = default_home()
    batch_id = new_id(loaded.name, None)
    path = suite.absolute()
    context = BatchContext(home, load_settings(), loaded, path.parent, batch_id, database=database, progress=progress())
    runs = context.prepare()
    capacity = context.capacity(context.forecasts())
    scarcity, wanted = context.session.cloud.scarcity, min(loaded.concurrency, len(runs))
    if scarcity and capacity is not None and capacity < wanted:
        progress().note(too_many(wanted, capacity, scarcity))
    batch = Batch(
        id=batch_id, suite=within(loaded, capacity), suite_file=str(path), shared=bool(database), created_at=now(),
        version=__version__, runs=tuple(runs),
    )  # fmt: skip
    Batches(home).save(batch)
    progress().note(f"Batch {batch_id}: {len(runs)} runs. `provisioner batch status {batch_id}` shows them")
    return run_batch(home, batch, context, database)


def resume(batch: BatchArgument, database: DatabaseOption = "") -> Result:
    """Works on the runs of a batch that have not ended, each from its last finished step."""
    home, record, database = find_batch(batch, database)
    directory = Path(record.suite_file).parent
    context = BatchContext(
        home, load_settings(), record.suite, directory, record.id, database=database, progress=progress()
    )
    return run_batch(home, record, context, database, resumed=True)


def status(
    batch: Annotated[
        str | None,
        typer.Argument(metavar="[BATCH]", help="Id of the batch, or its beginning or end.", autocompletion=batch_ids),
    ] = None,
    database: DatabaseOption = "",
) -> Result:
    """Reports a batch's progress, active runs, failures and costs; without a batch, lists all batches."""
    if batch is None:
        return _list_batches(default_home())
    home, record, database = find_batch(batch, database)
    states, rows = states_and_rows(home, record, database)
    costs = batch_costs(session(database=database).ledger, record.id)
    running = [state.key for state in states.values() if state.state == "running"]
    attended = has_controller(home, record)
    environments = {known.id: known for known in session().environments.readable() if known.batch == record.id}
    lines = [f"{record.id}: {', '.join(summary(record, states, rows, costs))}"]
    if not attended and len(ended(rows)) < len(record.runs):
        lines.append(f"No controller is working on it: provisioner batch resume {record.id}")
    lines += [f"  runs: {key}" for key in running]
    lines += [
        f"  environment: {environment.id} ({environment.status}), ends at {environment.expires_at:%H:%M} UTC"
        for environment in environments.values()
    ]
    lines += [f"  {row_line(record.suite, row)}" for row in rows if row.outcome != "scored"]
    data = {
        **summary_data(record, rows, costs),
        "at_work": attended,
        "states": dict(Counter(state.state for state in states.values())),
        "running": running,
        "environments": sorted(environments),
    }
    return Result(data, "\n".join(lines))


def cancel(
    batch: BatchArgument,
    force: Annotated[bool, typer.Option("--force", help="Stop the active runs, too.")] = False,
    database: DatabaseOption = "",
) -> Result:
    """Cancels the runs of a batch that have not begun, until the batch is resumed."""
    home, record, database = find_batch(batch, database)
    states, _ = states_and_rows(home, record, database)
    # In a batch's first seconds its controller is still queueing the runs. It cancels what was noted before.
    over: set[str] = set()
    with contextlib.suppress(InfrastructureError):
        over = {row.key for row in Batches(home).results(record)}  # the queue may be gone
    by_key = {run.key: states.get(run.key) for run in record.runs if run.key in states or run.key not in over}
    stoppable = ("queued", "running") if force else ("queued",)
    chosen = [key for key, state in by_key.items() if state is None or state.state in stoppable]
    # A worker that is being stopped has cancelled its runs by itself. It requeues them unless they are cancelled again.
    requeued = [key for key, state in states.items() if state.state == "cancelled"]
    if chosen or requeued:
        Batches(home).note_cancelled(record, [*chosen, *requeued])
    if states:
        with contextlib.closing(open_client(home, record, database)) as client:
            client.cancel(record.id, [key for key in (*chosen, *requeued) if key in states])
    attended = has_controller(home, record)
    removed, problems = _remove_orphans(record) if force and not attended else ([], [])
    running = sum(state.state == "running" for state in states.values())
    text = f"{record.id}: {len(chosen)} runs cancelled."
    if running and not force:
        text += f" {running} are still running; --force stops them."
    elif running and attended:
        stopping = (
            "Their workers, if alive, stop them and clean up"
            if record.shared
            else "Their controller stops them and cleans up"
        )
        text += f" {running} are still running. {stopping}: provisioner batch status {record.id}"
    if removed:
        text += f" Removed: {', '.join(removed)}."
    if problems:
        raise StillThereError(f"{text} Not removed: {'; '.join(problems)}", hint="`provisioner sweep` tries again.")
    return Result({"batch": record.id, "cancelled": chosen, "removed": removed}, text)


def report(
    batch: BatchArgument,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Where to write it.", parser=parse_path)
    ] = None,
    database: DatabaseOption = "",
) -> Result:
    """Writes the page and the results of the runs that have ended by now."""
    home, record, database = find_batch(batch, database)
    _, rows = states_and_rows(home, record, database)
    # A controller that is working on the batch writes the results itself, and has newer ones.
    if not is_locked(Batches(home).lock(record.id)):
        Batches(home).write_results(record, rows, if_none_is_lost=True)
    rows = rows or Batches(home).results(record)  # the queue may be gone, as where only the results were kept
    page = write_report(home, record, rows, output)
    return Result({"batch": record.id, "report": str(page), "ended": len(rows)}, str(page))


def _offered(option: str, metavar: str, what: str) -> Any:
    """Returns an option with which a worker offers something to jobs."""
    text = f"{what} that jobs may name; repeatable."
    return typer.Option(option, metavar=metavar, help=text, show_default=False, parser=parse_path)


def worker(
    families: Annotated[list[Path] | None, _offered("--families", "DIR", "Directory with families")] = None,
    agents: Annotated[list[Path] | None, _offered("--agents", "DIR", "Directory with agents")] = None,
    env_file: Annotated[list[Path] | None, _offered("--env-file", "FILE", "File of secrets")] = None,
    allow: AllowOption = None,
    database: DatabaseOption = "",
) -> Result:
    """Works on runs until Ctrl-C; then its runs clean up and are queued again for other workers.

    Jobs come from a database, so they may name only what the options offer.
    """
    if not database:
        raise UsageError(
            "A worker needs --database: its work comes from there.",
            hint=f"--database postgresql://USER@HOST/NAME, or the same in {DATABASE_VARIABLE}.",
        )
    directories = [*(families or []), *(agents or [])]
    if missing := [path for path in directories if not path.is_dir()]:
        raise UsageError(f"{missing[0]} is not a directory.")
    if not families:
        raise UsageError(
            "A worker needs --families and --agents: a job may use only what is in these directories.",
            hint="--families DIR --agents DIR, with directories that the suites' families and agents lie in.",
        )
    for text in allow or []:
        parse_destination(text)
    offer = Offer(tuple(families), tuple(agents or ()), tuple(env_file or ()), tuple(allow or ()))
    return run_worker(default_home(), database, offer)


def _list_batches(home: Home) -> Result:
    batches = Batches(home).all()
    lines = [
        [
            batch.id,
            f"{_ended_count(home, batch)}/{len(batch.runs)}",
            f"{batch.created_at:%Y-%m-%d %H:%M}",
            "at work" if not batch.shared and has_controller(home, batch) else "-",
        ]
        for batch in batches
    ]
    data = [
        {"batch": batch.id, "runs": len(batch.runs), "created_at": batch.created_at.isoformat()} for batch in batches
    ]
    text = table(["BATCH", "ENDED", "CREATED (UTC)", "CONTROLLER"], lines) if batches else "No batch was run yet."
    return Result({"batches": data}, text)


def _ended_count(home: Home, batch: Batch) -> str:
    """Returns how many runs have ended, by the results; of results that cannot be read, which hide no others, `?`."""
    try:
        return str(len(ended(Batches(home).results(batch))))
    except InfrastructureError:
        return "?"


def _remove_orphans(batch: Batch) -> tuple[list[str], list[str]]:
    """Destroys the environments of a batch that no process looks after, as its controller was killed.

    Returns:
        the ids of those that are gone, and messages about those that could not be removed.
    """
    opened = session()
    removed, problems = [], []
    for environment in opened.environments.readable():
        if environment.batch != batch.id or is_locked(opened.environments.lease(environment.id)):
            continue
        try:
            lifecycle.destroy(session_of(environment, opened), environment)
            removed.append(environment.id)
        except ProvisionerError as error:
            problems.append(error.message)
    problems += [f"{error.message} {error.hint}" for error in unreadable_of(opened.environments, batch).values()]
    return removed, problems
