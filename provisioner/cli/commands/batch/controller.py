"""Works on one batch until it has ended, and shows it: what `batch run` and `batch resume` do."""

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
from provisioner.batch.queue import RunState
from provisioner.batch.records import Batch, Batches
from provisioner.batch.results import Row
from provisioner.batch.rows import collect_rows, unreadable_of
from provisioner.batch.worker import Worker, only_of
from provisioner.cli.command import shield
from provisioner.cli.commands.batch.results import final_result
from provisioner.cli.commands.batch.view import BatchView
from provisioner.cli.output import Result, stderr
from provisioner.store.files import is_locked, locked
from provisioner.store.home import Home

POLL_SECONDS = 1.0
# Results are written again as runs end, but not for each of hundreds.
WRITE_SECONDS = 5.0
OUTAGE_SECONDS = 300.0
MAX_PROBLEMS_SHOWN = 5


def run_batch(batch: Batch, context: BatchContext, *, resumed: bool = False) -> Result:
    """Works on a batch until all its runs have ended.

    Args:
        context: has the URL of the database with the queue; empty: the batch's own file.
        resumed: whether runs that were cancelled are to run after all. If not, those that the operator cancelled before
            they were queued stay cancelled.

    Raises:
        Interrupted: by the operator, once the active runs have cleaned up.
        UsageError: another process is working on the batch.
    """
    home, database = context.session.home, context.session.database
    with _controller_lock(home, batch):
        view = BatchView(Console(file=stderr(), highlight=False, soft_wrap=True), batch)
        worker = Worker(home, load_settings(), only_of(batch), database=database, context=context)
        controller = _Controller(batch, context, worker)
        try:
            if resumed:
                states = worker.client.states(batch.id)
                Batches(home).forget_cancelled(batch)
                worker.client.resume(batch.id, [key for key, state in states.items() if state.state == "cancelled"])
            worker.add(batch)
            rows, costs = controller.watch(view)
        except BaseException as error:
            with shield():
                view.note("Stopping: the active runs are cleaning up")
                cancelled = controller.stop(requeue=batch.shared and not isinstance(error, KeyboardInterrupt))
                problems = [*cleanup_problems(worker), *controller.remaining()][:MAX_PROBLEMS_SHOWN]
            if not isinstance(error, KeyboardInterrupt):
                note_problems(problems, view.note)
                raise
            interrupted = _interrupted(batch, problems, cancelled)
            interrupted.exit_code = exit_code(error)
            raise interrupted from None
        finally:
            view.stop()
            with shield():
                worker.close()
    return final_result(home, batch, rows, costs)


@contextlib.contextmanager
def _controller_lock(home: Home, batch: Batch) -> Iterator[None]:
    """Ensures that a batch whose queue is not shared has only one controller at a time."""

    def refuse() -> None:
        hint = f"`provisioner batch status {batch.id}` shows it."
        raise UsageError(f"Another process is working on {batch.id}.", hint=hint)

    with contextlib.nullcontext() if batch.shared else locked(Batches(home).lock(batch.id), on_wait=refuse):
        yield


class _Controller:
    """Works on a batch with this process's worker."""

    def __init__(self, batch: Batch, context: BatchContext, worker: Worker) -> None:
        self._batch, self._session, self._worker = batch, context.session, worker
        self._batches = Batches(context.session.home)

    def watch(self, view: BatchView) -> tuple[list[Row], tuple[int, int]]:
        """Shows the batch and writes its results until all runs have ended. Returns their rows and the costs."""
        batch, worker = self._batch, self._worker
        known: dict[str, Row] = {}
        written, written_at = -1, 0.0
        outage = OutageTolerance(view.note)
        while True:
            begin = time.monotonic()
            with outage.tolerated():
                states = worker.poll([batch.id])[batch.id]
                rows = self._rows(states, known)
                worker.reconcile_cancellations(batch.id, states, self._batches.noted_cancelled(batch))
                active_runs = worker.live_status.active_runs()
                ended = len(rows) == len(batch.runs) and not active_runs
                costs = batch_costs(self._session.ledger, batch.id)
                view.show(states, rows, active_runs, worker.live_status.take_notes(), costs)
                if ended or (len(rows) != written and time.monotonic() - written_at > WRITE_SECONDS):
                    self._batches.write_results(batch, rows)
                    written, written_at = len(rows), time.monotonic()
                if ended:
                    return rows, costs
            # A poll of thousands of runs takes long: at most a fifth of the time is spent on it.
            time.sleep(max(POLL_SECONDS, 4 * (time.monotonic() - begin)))

    def _rows(self, states: Mapping[str, RunState], known: dict[str, Row]) -> list[Row]:
        outputs = partial(self._worker.client.outputs, self._batch.id)
        cancelled = self._batches.cancelled(self._batch)
        return collect_rows(self._batch, states, known, outputs, self._session.ledger, cancelled)

    def stop(self, *, requeue: bool) -> bool:
        """Stops the batch's runs here, writes the results, and returns whether the runs were cancelled in the queue.

        Args:
            requeue: whether the workers that share the queue take over its runs, as only this controller failed.
        """
        cancelled = False
        if not requeue:
            keys = [run.key for run in self._batch.runs]
            # The disk or the database may have failed; each is tried.
            with contextlib.suppress(InfrastructureError, OSError):
                self._batches.note_cancelled(self._batch, keys)
            with contextlib.suppress(InfrastructureError):
                self._worker.client.cancel(self._batch.id, keys)
                cancelled = True
        self._worker.stop(requeue)
        with contextlib.suppress(InfrastructureError, OSError):
            rows = self._rows(self._worker.client.states(self._batch.id), {})
            self._batches.write_results(self._batch, rows)
        return cancelled

    def remaining(self) -> list[str]:
        """Returns messages about environments of the stopped batch that are left here: of earlier attempts, too."""
        store = self._session.environments
        try:
            left = [environment.id for environment in store.readable() if environment.batch == self._batch.id]
            left += unreadable_of(store, self._batch)
            # What another worker looks after is that worker's to remove.
            left = [identity for identity in left if not (self._batch.shared and is_locked(store.lease(identity)))]
        except OSError as error:
            return [f"the records of environments cannot be read: {error}"]
        return [f"{identity} is not confirmed to be gone" for identity in left]


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


def _interrupted(batch: Batch, problems: list[str], cancelled: bool) -> Interrupted:
    """Returns the error for an operator that interrupted a batch."""
    hint = f"`provisioner batch resume {batch.id}` continues it."
    if problems:
        return Interrupted(
            f"Batch {batch.id} was interrupted, and not everything could be removed: {'; '.join(problems)}",
            hint=f"`provisioner sweep` removes what remains; {hint}",
        )
    others = ""
    if batch.shared:
        told = "have been told to stop theirs" if cancelled else "could not be told, and continue"
        others = f" here; other workers {told}"
    return Interrupted(f"Batch {batch.id} was interrupted; none of its environments remain{others}.", hint=hint)


def cleanup_problems(worker: Worker) -> list[str]:
    """Returns messages about what a stopped worker could not remove."""
    unfinished = (f"{active_run.key} is still cleaning up" for active_run in worker.live_status.active_runs())
    return [*worker.cleanup_errors, *unfinished]


def note_problems(problems: list[str], note: Callable[[str], None]) -> None:
    """Says what could not be removed, beside the error that ends the command."""
    if problems:
        note(f"Not everything could be removed: {'; '.join(problems)}. `provisioner sweep` removes what remains.")
