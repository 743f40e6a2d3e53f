"""Works on one batch, or as a worker on many, and shows it: what `batch run`, `resume` and `worker` do."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from rich.console import Console

from provisioner.base.config import load_settings
from provisioner.base.errors import InfrastructureError, Interrupted, LivenessLostError, UsageError
from provisioner.base.signals import exit_code
from provisioner.batch.context import BatchContext, batch_costs
from provisioner.batch.engine import RunState
from provisioner.batch.offers import Offer, only_of
from provisioner.batch.records import Batch, Batches
from provisioner.batch.results import Row
from provisioner.batch.rows import collect_rows, unreadable_of
from provisioner.batch.worker import Worker
from provisioner.cli.command import progress, shield
from provisioner.cli.commands.batch.results import final_result
from provisioner.cli.commands.batch.view import BatchView
from provisioner.cli.output import Result
from provisioner.cli.streams import stderr
from provisioner.store.files import is_locked, locked
from provisioner.store.home import Home

POLL_SECONDS = 1.0
# Results are written again as runs end, but not for each of hundreds.
WRITE_SECONDS = 5.0
OUTAGE_SECONDS = 300.0
MAX_PROBLEMS_SHOWN = 5


def run_batch(home: Home, batch: Batch, context: BatchContext, database: str, *, resumed: bool = False) -> Result:
    """Works on a batch until all its runs have ended.

    Args:
        database: URL of the database with the queue; empty: the batch's own file.
        resumed: whether runs that were cancelled are to run after all. If not, those that the operator cancelled before
            they were queued stay cancelled.

    Raises:
        Interrupted: by the operator, once the active runs have cleaned up.
        UsageError: another process is working on the batch.
    """
    with _controller_lock(home, batch):
        view = BatchView(Console(file=stderr(), highlight=False, soft_wrap=True), batch)
        worker = Worker(home, load_settings(), only_of(batch), database=database, context=context)
        try:
            if resumed:
                states = worker.client.states(batch.id)
                Batches(home).forget_cancelled(batch)
                worker.client.resume(batch.id, [key for key, state in states.items() if state.state == "cancelled"])
            worker.add(batch)
            rows, costs = _watch(home, batch, context, worker, view)
        except BaseException as error:
            with shield():
                view.note("Stopping: the active runs are cleaning up")
                cancelled = _stop(home, batch, context, worker, by_operator=isinstance(error, KeyboardInterrupt))
                problems = [*_cleanup_problems(worker), *_remaining(context, batch)][:MAX_PROBLEMS_SHOWN]
            if not isinstance(error, KeyboardInterrupt):
                _note_problems(problems, view.note)
                raise
            interrupted = _interrupted(batch, problems, cancelled)
            interrupted.exit_code = exit_code(error)
            raise interrupted from None
        finally:
            view.stop()
            with shield():
                worker.close()
    return final_result(home, batch, rows, costs)


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
        problems = _cleanup_problems(worker)[:MAX_PROBLEMS_SHOWN]
        if not isinstance(error, KeyboardInterrupt):
            _note_problems(problems, progress().note)
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


class OutageTolerance:
    """Tolerates a database or a disk that fails for up to five minutes, as active runs must not end because of it.

    Args:
        note: called with a line for the operator when an outage begins.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._failing_since: float | None = None

    @contextlib.contextmanager
    def tolerated(self) -> Iterator[None]:
        """Suppresses the errors of an outage, for one try.

        Raises:
            LivenessLostError: always at once: other workers consider this one dead.
            InfrastructureError, OSError: the outage has lasted too long.
        """
        try:
            yield
            self._failing_since = None
        except LivenessLostError:
            raise
        except (InfrastructureError, OSError) as error:
            if self._failing_since is None:
                self._failing_since = time.monotonic()
                self._note(f"{error} Active runs continue; trying again for {OUTAGE_SECONDS / 60:g} minutes")
            elif time.monotonic() - self._failing_since > OUTAGE_SECONDS:
                raise


@contextlib.contextmanager
def _controller_lock(home: Home, batch: Batch) -> Iterator[None]:
    """Ensures that a batch whose queue is not shared has only one controller at a time."""

    def refuse() -> None:
        raise UsageError(
            f"Another process is working on {batch.id}.", hint=f"`provisioner batch status {batch.id}` shows it."
        )

    with contextlib.ExitStack() as stack:
        if not batch.shared:
            stack.enter_context(locked(Batches(home).lock(batch.id), on_wait=refuse))
        yield


def _watch(
    home: Home, batch: Batch, context: BatchContext, worker: Worker, view: BatchView
) -> tuple[list[Row], tuple[int, int]]:
    """Shows the batch and writes its results, until all runs have ended. Returns their rows and the batch's costs."""
    known: dict[str, Row] = {}
    written, written_at = -1, 0.0
    outage = OutageTolerance(view.note)
    while True:
        begin = time.monotonic()
        with outage.tolerated():
            states = worker.poll([batch.id])[batch.id]
            rows = _rows(home, batch, context, worker, states, known)
            worker.reconcile_cancellations(batch.id, states, Batches(home).noted_cancelled(batch))
            active_runs = worker.live_status.active_runs()
            ended = len(rows) == len(batch.runs) and not active_runs
            costs = batch_costs(context.session.ledger, batch.id)
            view.show(states, rows, active_runs, worker.live_status.take_notes(), costs)
            if ended or (len(rows) != written and time.monotonic() - written_at > WRITE_SECONDS):
                Batches(home).write_results(batch, rows)
                written, written_at = len(rows), time.monotonic()
            if ended:
                return rows, costs
        # A poll of thousands of runs takes long: at most a fifth of the time is spent on it.
        time.sleep(max(POLL_SECONDS, 4 * (time.monotonic() - begin)))


def _rows(
    home: Home,
    batch: Batch,
    context: BatchContext,
    worker: Worker,
    states: Mapping[str, RunState],
    known: dict[str, Row],
) -> list[Row]:
    outputs = partial(worker.client.outputs, batch.id)
    return collect_rows(batch, states, known, outputs, context.session.ledger, Batches(home).cancelled(batch))


def _stop(home: Home, batch: Batch, context: BatchContext, worker: Worker, *, by_operator: bool) -> bool:
    """Stops a batch's runs here, and writes the results of those that have ended.

    Args:
        by_operator: whether the operator interrupted the batch, so that all its runs are cancelled. If instead this
            controller failed, the workers that share the queue take over its runs.

    Returns:
        whether the runs were cancelled in the queue.
    """
    requeue = batch.shared and not by_operator
    cancelled = False
    if not requeue:
        keys = [run.key for run in batch.runs]
        # The disk or the database may have failed; each is tried.
        with contextlib.suppress(InfrastructureError, OSError):
            Batches(home).note_cancelled(batch, keys)
        with contextlib.suppress(InfrastructureError):
            worker.client.cancel(batch.id, keys)
            cancelled = True
    worker.stop(requeue)
    with contextlib.suppress(InfrastructureError, OSError):
        states = worker.client.states(batch.id)
        Batches(home).write_results(batch, _rows(home, batch, context, worker, states, {}))
    return cancelled


def _interrupted(batch: Batch, problems: list[str], cancelled: bool) -> Interrupted:
    """Returns the error for an operator that interrupted a batch.

    Args:
        problems: what could not be removed.
        cancelled: whether the runs were cancelled in the queue, so that other workers learn of it.
    """
    hint = f"`provisioner batch resume {batch.id}` continues it."
    if problems:
        return Interrupted(
            f"Batch {batch.id} was interrupted, and not everything could be removed: {'; '.join(problems)}",
            hint=f"`provisioner sweep` removes what remains; {hint}",
        )
    others = ""
    if batch.shared:
        others = (
            " here; other workers have been told to stop theirs"
            if cancelled
            else " here; other workers could not be told, and continue"
        )
    return Interrupted(f"Batch {batch.id} was interrupted; none of its environments remain{others}.", hint=hint)


def _cleanup_problems(worker: Worker) -> list[str]:
    """Returns messages about what a stopped worker could not remove."""
    unfinished = (f"{active_run.key} is still cleaning up" for active_run in worker.live_status.active_runs())
    return [*worker.cleanup_errors, *unfinished]


def _remaining(context: BatchContext, batch: Batch) -> list[str]:
    """Returns messages about environments of a stopped batch that are left here: of earlier attempts, too."""
    store = context.session.environments
    try:
        left = [environment.id for environment in store.readable() if environment.batch == batch.id]
        left += unreadable_of(store, batch)
        # What another worker looks after is that worker's to remove.
        left = [identity for identity in left if not (batch.shared and is_locked(store.lease(identity)))]
    except OSError as error:
        return [f"the records of environments cannot be read: {error}"]
    return [f"{identity} is not confirmed to be gone" for identity in left]


def _note_problems(problems: list[str], note: Callable[[str], None]) -> None:
    """Says what could not be removed, beside the error that ends the command."""
    if problems:
        note(f"Not everything could be removed: {'; '.join(problems)}. `provisioner sweep` removes what remains.")
