"""Works on a batch, or as a worker on many, and shows it: what `batch run`, `resume` and `worker` do."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from provisioner.batch.context import BatchContext
from provisioner.batch.engine import RunState
from provisioner.batch.records import Batch, Batches
from provisioner.batch.report import render
from provisioner.batch.results import Row, by_task_and_agent, estimate
from provisioner.batch.worker import Worker, rows_of
from provisioner.cli.batch_view import BatchView
from provisioner.cli.context import progress, shield
from provisioner.cli.output import Result, table
from provisioner.cli.streams import stderr
from provisioner.clock import now
from provisioner.config import load_settings
from provisioner.costs.prices import MICRO, dollars
from provisioner.errors import BudgetError, InfrastructureError, Interrupted, PresenceLostError, UsageError
from provisioner.store.home import Home
from provisioner.store.locks import locked

LOOK_SECONDS = 1.0
# Results are written again as runs end, but not for each of hundreds.
WRITE_SECONDS = 5.0
PATIENCE_SECONDS = 300.0


def work(home: Home, batch: Batch, context: BatchContext, database: str) -> Result:
    """Works on a batch to its end, or until it is interrupted."""
    with _alone(home, batch):
        worker = Worker(home, load_settings(), database=database, context=context)
        view = BatchView(Console(file=stderr(), highlight=False, soft_wrap=True), batch)
        try:
            worker.add(batch)
            states = worker.client.states(batch.id)
            Batches(home).forget_cancelled(batch)
            worker.client.resume(batch.id, [key for key, one in states.items() if one.state == "cancelled"])
            rows = _watch(home, batch, context, worker, view)
        except BaseException as error:
            with shield():
                view.note("Stopping; what runs is cleared away")
                # Not the operator, but this controller failed: where there are workers, they go on.
                hand_back = batch.shared and not isinstance(error, KeyboardInterrupt)
                cancelled = False
                if not hand_back:
                    # The disk or the database may have failed: each is tried.
                    with contextlib.suppress(OSError):
                        Batches(home).note_cancelled(batch, [run.key for run in batch.runs])
                    with contextlib.suppress(InfrastructureError):
                        worker.client.cancel(batch.id, [run.key for run in batch.runs])
                        cancelled = True
                worker.stop(hand_back)
                with contextlib.suppress(InfrastructureError, OSError):
                    states = worker.client.states(batch.id)
                    Batches(home).write_results(batch, _rows(home, batch, context, worker, states, {}))
            if not isinstance(error, KeyboardInterrupt):
                raise
            raise _interrupted(batch, worker, cancelled) from None
        finally:
            view.stop()
            with shield():
                worker.close()
    return _finished(home, batch, rows, context.spent())


def _interrupted(batch: Batch, worker: Worker, cancelled: bool) -> Interrupted:
    hint = f"provisioner batch resume {batch.id} goes on with it."
    left = [*worker.troubles, *(f"{one.key} still clears away" for one in worker.live_status.active_runs())]
    if left:
        return Interrupted(
            f"Batch {batch.id} was interrupted, and not all of it could be cleared away: {'; '.join(left[:5])}",
            hint=f"provisioner sweep removes what is left; {hint}",
        )
    elsewhere = ""
    if batch.shared:
        told = "other workers are told to end theirs" if cancelled else "other workers could not be told, and go on"
        elsewhere = f" here; {told}"
    return Interrupted(f"Batch {batch.id} was interrupted; nothing of it is left running{elsewhere}.", hint=hint)


@contextlib.contextmanager
def _alone(home: Home, batch: Batch) -> Iterator[None]:
    """One controller at a time, where the queue is not shared."""

    def refuse() -> None:
        raise UsageError(f"Another process works on {batch.id}.", hint=f"provisioner batch status {batch.id} shows it.")

    with contextlib.ExitStack() as stack:
        if not batch.shared:
            stack.enter_context(locked(Batches(home).lock(batch.id), on_wait=refuse))
        yield


def _watch(home: Home, batch: Batch, context: BatchContext, worker: Worker, view: BatchView) -> list[Row]:
    """Shows the batch until all its runs have ended."""
    known: dict[str, Row] = {}
    written, written_at = -1, 0.0
    patience = Patience(view.note)
    while True:
        begin = time.monotonic()
        with patience.bearing():
            states = worker.look([batch.id])[batch.id]
            rows = _rows(home, batch, context, worker, states, known)
            if (cancelled := Batches(home).cancelled(batch)) is not None:
                worker.mend_handing_back(batch.id, states, cancelled)
            running = worker.live_status.active_runs()
            ended = len(rows) == len(batch.runs) and not running
            view.show(states, rows, running, worker.live_status.take_notes(), context.spent())
            if ended or (len(rows) != written and time.monotonic() - written_at > WRITE_SECONDS):
                Batches(home).write_results(batch, rows)
                written, written_at = len(rows), time.monotonic()
            if ended:
                return rows
        # With thousands of runs a look takes its time: most of the time is for them.
        time.sleep(max(LOOK_SECONDS, 4 * (time.monotonic() - begin)))


def _rows(
    home: Home,
    batch: Batch,
    context: BatchContext,
    worker: Worker,
    states: Mapping[str, RunState],
    known: dict[str, Row],
) -> list[Row]:
    outputs = partial(worker.client.outputs, batch.id)
    return rows_of(batch, states, known, outputs, context.session.ledger, Batches(home).cancelled(batch))


class Patience:
    """Bears with a database or a disk that fails for a while: what runs must not end for it.

    Args:
        note: told when it begins to fail.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._failing_since: float | None = None

    @contextlib.contextmanager
    def bearing(self) -> Iterator[None]:
        """One try.

        Raises:
            PresenceLostError: at once: others take us for dead.
            InfrastructureError, OSError: it has failed for too long.
        """
        try:
            yield
            self._failing_since = None
        except PresenceLostError:
            raise
        except (InfrastructureError, OSError) as error:
            if self._failing_since is None:
                self._failing_since = time.monotonic()
                self._note(f"{error} What runs goes on; asking again for {PATIENCE_SECONDS / 60:g} minutes")
            elif time.monotonic() - self._failing_since > PATIENCE_SECONDS:
                raise


def _finished(home: Home, batch: Batch, rows: list[Row], money: tuple[int, int]) -> Result:
    page = write_report(home, batch, rows, None)
    directory = Batches(home).directory(batch.id)
    outcomes = Counter(row.outcome for row in rows)
    data = {
        **summary_data(batch, rows, money),
        "results": str(directory / "results.jsonl"),
        "csv": str(directory / "results.csv"),
        "report": str(page),
    }
    code = 0
    if outcomes["infrastructure_failed"]:
        code = InfrastructureError.exit_code
    elif outcomes["over_budget"]:
        code = BudgetError.exit_code
    elif outcomes["cancelled"]:
        code = Interrupted.exit_code
    text = "\n".join(
        [_scores(rows), "", f"{batch.id}: {dollars(money[1])} spent.", f"results: {directory / 'results.csv'}",
         f"report:  {page}"]
    )  # fmt: skip
    return Result(data, text, code)


def summary_data(batch: Batch, rows: Sequence[Row], money: tuple[int, int]) -> dict[str, Any]:
    """A batch and its rows, for machines."""
    return {
        "batch": batch.id,
        "suite": batch.suite.name,
        "runs": len(batch.runs),
        "ended": len(rows),
        "outcomes": dict(Counter(row.outcome for row in rows)),
        "held_usd": money[0] / MICRO,
        "spent_usd": money[1] / MICRO,
        "rows": [row.model_dump(mode="json") for row in rows],
    }


def _scores(rows: Sequence[Row]) -> str:
    lines = []
    for (task, agent), found in by_task_and_agent(rows).items():
        one = estimate([row.score for row in found if row.score is not None])
        interval = f"{one.low:.2f} to {one.high:.2f}" if one and one.low is not None and one.high is not None else "-"
        kinds = Counter(row.outcome for row in found)
        said = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        lines.append([task, agent, str(len(found)), f"{one.mean:.2f}" if one else "-", interval, said])
    return table(["TASK", "AGENT", "RUNS", "MEAN", "95 %", "ENDED AS"], lines)


def write_report(home: Home, batch: Batch, rows: Sequence[Row], output: Path | None) -> Path:
    """Writes the report and says where; None: beside the results.

    Raises:
        UsageError: it cannot be written there.
    """
    page = (output or Batches(home).directory(batch.id) / "report.html").absolute()
    try:
        logs = os.path.relpath(home.archive, page.parent)
        page.write_text(render(batch.id, rows, now(), logs))
    except OSError as error:
        raise UsageError(f"{page} cannot be written: {error.strerror}.") from error
    return page


def serve(home: Home, database: str) -> Result:
    """Works on the runs of all batches in a database, until it is interrupted.

    Raises:
        Interrupted: always, in the end.
        InfrastructureError: the database cannot be reached.
    """
    worker = Worker(home, load_settings(), database=database)
    progress().note("Waiting for runs; Ctrl-C ends")
    seen: set[str] = set()
    patience = Patience(progress().note)
    try:
        while True:
            running = {one.key for one in worker.live_status.active_runs()}
            for key in sorted(running - seen):
                progress().note(f"{key}: begins")
            for key in sorted(seen - running):
                progress().note(f"{key}: ended")
            for key, text in worker.live_status.take_notes():
                progress().note(f"{key}: {text}")
            seen = running
            with patience.bearing():
                worker.look(sorted({key.partition("/")[0] for key in running}))
            time.sleep(LOOK_SECONDS)
    except BaseException as error:
        with shield():
            progress().note("Stopping; what runs here is cleared away and queued again")
            worker.stop(hand_back=True)
        if not isinstance(error, KeyboardInterrupt):
            raise
        left = [*worker.troubles, *(f"{one.key} still clears away" for one in worker.live_status.active_runs())]
        raise Interrupted(
            "The worker was interrupted; its runs wait for another one."
            + (f" Not all could be cleared away: {'; '.join(left[:5])}" if left else ""),
            hint="provisioner sweep removes what is left." if left else None,
        ) from None
    finally:
        with shield():
            worker.close()
