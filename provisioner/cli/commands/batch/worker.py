"""The command `batch worker`: works on the runs of all batches in a shared database."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from provisioner.base.config import load_settings
from provisioner.base.errors import Interrupted, UsageError
from provisioner.base.signals import exit_code
from provisioner.batch.worker import Offer, Worker
from provisioner.cli.command import default_home, progress, shield
from provisioner.cli.commands.batch.controller import (
    MAX_PROBLEMS_SHOWN,
    POLL_SECONDS,
    OutageTolerance,
    cleanup_problems,
    note_problems,
)
from provisioner.cli.commands.batch.lookup import DatabaseOption
from provisioner.cli.options import DATABASE_VARIABLE, AllowOption, parse_path
from provisioner.cli.output import Result
from provisioner.environment.allowlist import parse_destination
from provisioner.store.home import Home


def _offered(option: str, metavar: str, what: str) -> Any:
    """Returns an option with which a worker offers something to jobs."""
    text = f"{what} that jobs may name; repeatable."
    return typer.Option(option, metavar=metavar, help=text, parser=parse_path)


def main(
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


def run_worker(home: Home, database: str, offer: Offer) -> Result:
    """Works on the runs of all batches in a shared database, until it is interrupted.

    Args:
        offer: what the jobs may name.

    Raises:
        Interrupted: always, in the end.
        InfrastructureError: the database cannot be used.
    """
    worker = Worker(home, load_settings(), offer.check, database=database)
    progress().note("Waiting for runs; Ctrl-C ends")
    shown: set[str] = set()
    outage = OutageTolerance(progress().note)
    try:
        while True:
            active = {active_run.key for active_run in worker.live_status.active_runs()}
            for key in sorted(active - shown):
                progress().note(f"{key}: begins")
            for key in sorted(shown - active):
                progress().note(f"{key}: ended")
            for key, text in worker.live_status.take_notes():
                progress().note(f"{key}: {text}")
            shown = active
            with outage.tolerated():
                worker.poll(sorted({key.partition("/")[0] for key in active}))
            time.sleep(POLL_SECONDS)
    except BaseException as error:
        with shield():
            progress().note("Stopping: the active runs are cleaning up and are queued again")
            worker.stop(requeue=True)
        problems = cleanup_problems(worker)[:MAX_PROBLEMS_SHOWN]
        if not isinstance(error, KeyboardInterrupt):
            note_problems(problems, progress().note)
            raise
        interrupted = Interrupted(
            "The worker was interrupted; its runs wait for another worker."
            + (f" Not everything could be removed: {'; '.join(problems)}" if problems else ""),
            hint="`provisioner sweep` removes what remains." if problems else None,
        )
        interrupted.exit_code = exit_code(error)
        raise interrupted from None
    finally:
        with shield():
            worker.close()
