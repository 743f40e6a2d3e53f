"""The command `batch watch`: shows a batch that another process is working on, until it has ended."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping

from rich.console import Console

from provisioner.base.clock import now
from provisioner.base.models import Environment
from provisioner.batch.context import batch_costs
from provisioner.batch.live_status import OUTPUT_CHARACTERS, ActiveRun
from provisioner.batch.queue import RunState
from provisioner.batch.records import Batch
from provisioner.batch.suite import environment_id
from provisioner.batch.workflow import MAX_ATTEMPTS
from provisioner.cli.commands.batch.lookup import (
    STARTING,
    BatchArgument,
    DatabaseOption,
    ended,
    find_batch,
    has_controller,
    reader,
)
from provisioner.cli.commands.batch.results import summary_data
from provisioner.cli.commands.batch.view import BatchView, summary
from provisioner.cli.output import Result, stderr
from provisioner.cli.sessions import session
from provisioner.session import Session
from provisioner.store.files import read_end

POLL_SECONDS = 1.0


def main(batch: BatchArgument, database: DatabaseOption = "") -> Result:
    """Shows what `batch run` shows, and changes nothing. Ends with the batch, with its controller, or with Ctrl-C."""
    home, record, database = find_batch(batch, database)
    opened = session(database=database)
    with reader(home, record, database) as read:
        states, rows = read()
        view = BatchView(Console(file=stderr(), highlight=False, soft_wrap=True), record, {row.key for row in rows})
        attended = False
        try:
            while True:
                begin = time.monotonic()
                # Asked first: what it did last is then read.
                was_attended, attended = attended, has_controller(home, record)
                states, rows = read()
                costs = batch_costs(opened.ledger, record.id)
                view.show(states, rows, active_runs(opened, record, states), [], costs)
                starting = not was_attended and abs(now() - record.created_at) < STARTING
                if len(ended(rows)) == len(record.runs) or not (attended or starting):
                    break
                # A poll of thousands of runs takes long: at most a fifth of the time is spent on it.
                time.sleep(max(POLL_SECONDS, 4 * (time.monotonic() - begin)))
        finally:
            view.stop()
    lines = [f"{record.id}: {', '.join(summary(record, states, rows, costs))}"]
    if len(ended(rows)) < len(record.runs):
        lines.append(f"No controller is working on it: provisioner batch resume {record.id}")
    return Result(summary_data(record, rows, costs), "\n".join(lines))


def active_runs(opened: Session, batch: Batch, states: Mapping[str, RunState]) -> list[ActiveRun]:
    """Returns what the records of this host's environments say of the runs that the queue calls running.

    A run whose environment is on another host, or not there yet, has no phase.
    """
    running = [run for run in batch.runs if run.key in states and states[run.key].state == "running"]
    environments = {known.id: known for known in opened.environments.readable() if known.batch == batch.id}
    active = []
    for run in running:
        shown = ActiveRun(f"{batch.id}/{run.key}", phase="")
        for number in range(1, MAX_ATTEMPTS + 1):
            identity = environment_id(batch.id, run.key, run.task, number)
            if environment := environments.get(identity):
                shown.attempt, shown.phase, shown.output = number, doing(environment), _said(opened, environment)
        active.append(shown)
    return active


def doing(environment: Environment) -> str:
    """Names what is going on in an environment of a batch, as far as its record tells. Pure."""
    if environment.status in ("destroying", "unverified"):
        return "destroy"
    if environment.status != "ready":
        return "coming up"
    if environment.agent_ended_at:
        return "score"
    return "agent" if environment.agent_at else "ready"


def _said(opened: Session, environment: Environment) -> str:
    """Returns the end of what the agent has said while it runs, for the display."""
    if doing(environment) != "agent":
        return ""
    with contextlib.suppress(OSError):
        log = opened.environments.logs(environment.id) / "agent.log"
        return read_end(log, OUTPUT_CHARACTERS).decode(errors="replace")
    return ""
