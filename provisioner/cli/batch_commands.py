"""batch run, plan, status, resume, cancel, report, worker, schema."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from provisioner.batch.context import BatchContext, money_of
from provisioner.batch.engine import RunState
from provisioner.batch.records import Batch, Batches
from provisioner.batch.results import Row
from provisioner.batch.suite import load_suite
from provisioner.batch.suite import schema as suite_schema
from provisioner.batch.worker import open_client, rows_of
from provisioner.cli.batch_plan import planned
from provisioner.cli.batch_running import serve, summary_data, work, write_report
from provisioner.cli.batch_view import row_line, summary
from provisioner.cli.context import (
    DATABASE_VARIABLE,
    command,
    default_home,
    parse_database,
    parse_path,
    progress,
    session,
    session_of,
)
from provisioner.cli.output import Result, table
from provisioner.clock import now
from provisioner.config import load_settings
from provisioner.environment import lifecycle
from provisioner.errors import ProvisionerError, StillThereError, UsageError
from provisioner.store.environments import new_id
from provisioner.store.home import Home
from provisioner.store.locks import is_locked
from provisioner.version import __version__

SuiteArgument = Annotated[
    Path, typer.Argument(metavar="SUITE", help="The suite file (YAML).", show_default=False, parser=parse_path)
]


def batch_ids(incomplete: str) -> list[str]:
    """Ids for the shell's completion."""
    with contextlib.suppress(OSError, RuntimeError):
        return sorted(path.name for path in Home.default().batches.iterdir() if path.name.startswith(incomplete))
    return []


BatchArgument = Annotated[
    str, typer.Argument(metavar="BATCH", help="Id of the batch, or its beginning or end.", autocompletion=batch_ids)
]
DatabaseOption = Annotated[
    str,
    typer.Option(
        "--database",
        metavar="URL",
        envvar=DATABASE_VARIABLE,
        help="postgresql://... that several workers share. Default: a file of the batch.",
        show_default=False,
        parser=parse_database,
    ),
]


def register(app: typer.Typer) -> None:
    """Adds the commands, as a group."""
    group = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
    app.add_typer(group, name="batch")
    command(group, "run", help="Run a suite to its end.")(run)
    command(group, "plan", help="Show what a suite would run, and what it costs at the most. Creates nothing.")(plan)
    command(group, "status", help="Show how far a batch has come; without one, list all.")(status)
    command(group, "resume", help="Go on with a batch that was interrupted, killed or cancelled.")(resume)
    command(group, "cancel", help="Start no more runs of a batch; with --force, end those that run.")(cancel)
    command(group, "report", help="Write a batch's report: one HTML page.")(report)
    command(group, "worker", help="Work on the runs of all batches in a shared database, until interrupted.")(worker)
    command(group, "schema", help="Print the JSON Schema of suite files.")(schema)


def schema() -> Result:
    """What a suite file may hold."""
    return Result(suite_schema(), json.dumps(suite_schema(), indent=2))


def plan(suite: SuiteArgument) -> Result:
    """What would run, and its worst case."""
    loaded = load_suite(suite)
    context = BatchContext(default_home(), load_settings(), loaded, suite.absolute().parent, "plan")
    return planned(loaded, context.forecasts())


def run(suite: SuiteArgument, database: DatabaseOption = "") -> Result:
    """Images first, then all runs."""
    loaded = load_suite(suite)
    home = default_home()
    batch_id = new_id(loaded.name, None)
    path = suite.absolute()
    context = BatchContext(home, load_settings(), loaded, path.parent, batch_id, database=database, progress=progress())
    runs = context.prepare()
    batch = Batch(
        id=batch_id, suite=loaded, suite_file=str(path), shared=bool(database), created_at=now(), version=__version__,
        runs=tuple(runs),
    )  # fmt: skip
    Batches(home).save(batch)
    progress().note(f"Batch {batch_id}: {len(runs)} runs. `provisioner batch status {batch_id}` shows them")
    return work(home, batch, context, database)


def resume(batch: BatchArgument, database: DatabaseOption = "") -> Result:
    """Runs that had ended stay as they are; what was cut short is begun again."""
    home, found, database = _find(batch, database)
    directory = Path(found.suite_file).parent
    context = BatchContext(
        home, load_settings(), found.suite, directory, found.id, database=database, progress=progress()
    )
    return work(home, found, context, database)


def _find(name: str, database: str) -> tuple[Home, Batch, str]:
    """The batch, and the database of its queue: empty where that is its own file, whatever the variable says."""
    home = default_home()
    batch = Batches(home).find(name)
    if batch.shared and not database:
        raise UsageError(
            f"The queue of {batch.id} is in a database.", hint="Name it with --database or PROVISIONER_DATABASE."
        )
    return home, batch, database if batch.shared else ""


def status(
    batch: Annotated[
        str | None,
        typer.Argument(metavar="[BATCH]", help="Id of the batch, or its beginning or end.", autocompletion=batch_ids),
    ] = None,
    database: DatabaseOption = "",
) -> Result:
    """Counts, what runs, what failed, and what it cost so far."""
    if batch is None:
        home = default_home()
        known = Batches(home).all()
        lines = [
            [one.id, f"{len(_ended(Batches(home).results(one)))}/{len(one.runs)}", f"{one.created_at:%Y-%m-%d %H:%M}",
             "at work" if not one.shared and is_locked(Batches(home).lock(one.id)) else "-"]
            for one in known
        ]  # fmt: skip
        listed: list[dict[str, Any]] = [
            {"batch": one.id, "runs": len(one.runs), "created_at": one.created_at.isoformat()} for one in known
        ]
        shown = table(["BATCH", "ENDED", "CREATED (UTC)", "CONTROLLER"], lines) if known else "No batch was run yet."
        return Result({"batches": listed}, shown)
    home, found, database = _find(batch, database)
    states, rows = _state(home, found, database)
    money = money_of(session(database=database).ledger, found.id)
    running = [one for one in states.values() if one.state == "running"]
    at_work = found.shared or is_locked(Batches(home).lock(found.id))
    live = {one.id: one for one in session().environments.readable() if one.batch == found.id}
    text = [f"{found.id}: {summary(found, states, rows, *money)}"]
    if not at_work and len(_ended(rows)) < len(found.runs):
        text.append(f"No controller works on it: provisioner batch resume {found.id}")
    text += [f"  runs: {one.key}" for one in running]
    text += [f"  environment: {one.id} ({one.status}), ends at {one.expires_at:%H:%M} UTC" for one in live.values()]
    text += [f"  {row_line(row)}" for row in rows if row.outcome != "scored"]
    data = {
        **summary_data(found, rows, money),
        "at_work": at_work,
        "states": dict(Counter(one.state for one in states.values())),
        "running": [one.key for one in running],
        "environments": sorted(live),
    }
    return Result(data, "\n".join(text))


def _ended(rows: Sequence[Row]) -> list[Row]:
    """Those that need not be begun again."""
    return [row for row in rows if row.outcome != "cancelled"]


def _state(home: Home, batch: Batch, database: str) -> tuple[dict[str, RunState], list[Row]]:
    if not database and not (Batches(home).directory(batch.id) / "engine.sqlite").exists():
        return {}, []
    with contextlib.closing(open_client(home, batch, database)) as queue:
        states = queue.states(batch.id)
        ledger = session(database=database).ledger
        cancelled = Batches(home).cancelled(batch)
        return states, rows_of(batch, states, {}, lambda keys: queue.outputs(batch.id, keys), ledger, cancelled)


def cancel(
    batch: BatchArgument,
    force: Annotated[bool, typer.Option("--force", help="End the runs that are being worked on, too.")] = False,
    database: DatabaseOption = "",
) -> Result:
    """What has not begun never will, unless the batch is resumed."""
    home, found, database = _find(batch, database)
    states, _ = _state(home, found, database)
    chosen = [key for key, one in states.items() if one.state == "queued" or (force and one.state == "running")]
    # What a worker is just handing back is cancelled by itself already, and would come back without the note.
    handed = [key for key, one in states.items() if one.state == "cancelled"]
    if chosen or handed:
        Batches(home).note_cancelled(found, [*chosen, *handed])
    if chosen:
        with contextlib.closing(open_client(home, found, database)) as queue:
            queue.cancel(found.id, chosen)
    removed: list[str] = []
    stuck: list[str] = []
    at_work = found.shared or is_locked(Batches(home).lock(found.id))
    if force and not at_work:
        removed, stuck = _remove_leftovers(found)
    running = sum(one.state == "running" for one in states.values())
    text = f"{found.id}: {len(chosen)} runs cancelled."
    if running and not force:
        text += f" {running} still run; --force ends them."
    elif running and at_work:
        whose = "Their workers, as far as they live, clear" if found.shared else "Their controller clears"
        text += f" {whose} away what runs: provisioner batch status {found.id}"
    if removed:
        text += f" Removed: {', '.join(removed)}."
    if stuck:
        raise StillThereError(f"{text} Not gone: {'; '.join(stuck)}", hint="provisioner sweep tries again.")
    return Result({"batch": found.id, "cancelled": chosen, "removed": removed}, text)


def _remove_leftovers(batch: Batch) -> tuple[list[str], list[str]]:
    """Destroys what a killed controller has left: nobody else does.

    Returns:
        what is gone, and what would not go, in words.
    """
    opened = session()
    removed, stuck = [], []
    for one in opened.environments.readable():
        if one.batch != batch.id or is_locked(opened.environments.lease(one.id)):
            continue
        try:
            lifecycle.destroy(session_of(one, opened), one)
            removed.append(one.id)
        except ProvisionerError as error:
            stuck.append(error.message)
    return removed, stuck


def report(
    batch: BatchArgument,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Where to write it.", parser=parse_path)
    ] = None,
    database: DatabaseOption = "",
) -> Result:
    """The page, and the rows, of what has ended by now."""
    home, found, database = _find(batch, database)
    _, rows = _state(home, found, database)
    # A controller at work writes them itself, and later ones than these.
    if not is_locked(Batches(home).lock(found.id)) and len(rows) >= len(Batches(home).results(found)):
        Batches(home).write_results(found, rows)
    page = write_report(home, found, rows, output)
    return Result({"batch": found.id, "report": str(page), "ended": len(rows)}, str(page))


def worker(database: DatabaseOption = "") -> Result:
    """Until Ctrl-C: then its runs are cleared away and queued again for others."""
    if not database:
        raise UsageError(
            "A worker needs --database: that is where its work comes from.",
            hint=f"--database postgresql://USER@HOST/NAME, or the same in {DATABASE_VARIABLE}.",
        )
    return serve(default_home(), database)
