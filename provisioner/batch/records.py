"""The records of batches in the provisioner home: what each is to run, written before anything runs; its results."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from provisioner.base import strict_json
from provisioner.base.errors import InfrastructureError, UsageError
from provisioner.base.models import Record
from provisioner.batch.results import Row, as_csv, as_jsonl
from provisioner.batch.suite import Run, Suite
from provisioner.recording.manifest import seal
from provisioner.store.files import locked, write_atomically
from provisioner.store.home import Home

RECORD = "batch.json"
CANCELLED = "cancelled.json"
# Held while a file of the batch is read and written again.
LOCK = "results.lock"
DETAILS_CHARACTERS = 2000


class Batch(Record):
    """A batch.

    Args:
        suite_file: the file from which the suite was read; the suite's paths are relative to its directory.
        shared: whether its queue and ledger are in a database that several workers share.
        version: of provisioner.
        runs: all runs, in the suite's order.
    """

    id: str
    suite: Suite
    suite_file: str
    shared: bool
    created_at: datetime
    version: str
    runs: tuple[Run, ...]


class Job(Record):
    """A queued run, with all that a worker has to know about it. Read from a queue, it is untrusted: see offers.

    Args:
        batch: the batch's id.
        suite: the suite, reduced to what the run needs.
        directory: the suite file's directory.
    """

    batch: str
    suite: Suite
    directory: str
    run: Run


def jobs_of(batch: Batch) -> dict[str, Job]:
    """Returns the jobs of all runs of a batch, by the run's key. Pure."""
    directory = str(Path(batch.suite_file).parent)
    return {
        run.key: Job(batch=batch.id, suite=suite_for(batch.suite, run), directory=directory, run=run)
        for run in batch.runs
    }


def suite_for(suite: Suite, run: Run) -> Suite:
    """Returns the suite reduced to what one run needs, as each job has a copy of its own. Pure."""
    return suite.model_copy(
        update={
            "families": suite.families[:1],
            "agents": tuple(agent for agent in suite.agents if agent.name == run.agent),
            "submissions": tuple(submission for submission in suite.submissions if submission.name == run.agent),
        }
    )


class Batches:
    """The batches of a home."""

    def __init__(self, home: Home) -> None:
        self._root = home.batches

    def directory(self, batch_id: str) -> Path:
        """Returns the batch's directory, which has its record, its engine's database and its results."""
        return self._root / batch_id

    def lock(self, batch_id: str) -> Path:
        """Returns the file that the batch's controller keeps locked. A batch with a shared queue has no such lock."""
        return self.directory(batch_id) / "controller.lock"

    def save(self, batch: Batch) -> None:
        """Writes the record, and creates the batch's directory if needed."""
        directory = self.directory(batch.id)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(directory / RECORD, batch.model_dump_json(indent=2))

    def find(self, name: str) -> Batch:
        """Returns the batch with this id, or the only one whose id starts or ends with it.

        Raises:
            UsageError: there is no such batch, or more than one.
            InfrastructureError: its record cannot be read.
        """
        ids = sorted(path.parent.name for path in self._root.glob(f"*/{RECORD}"))
        matches = [batch_id for batch_id in ids if name and (batch_id.startswith(name) or batch_id.endswith(name))]
        if name in ids:
            matches = [name]
        if not matches:
            raise UsageError(f"There is no batch {name!r}.", hint="`provisioner batch status` lists them.")
        if len(matches) > 1:
            raise UsageError(f"{name!r} could mean any of: {', '.join(matches[:10])}.")
        return self._read(self.directory(matches[0]) / RECORD)

    def all(self) -> list[Batch]:
        """Returns the batches whose records can be read, oldest first."""
        batches = []
        for path in self._root.glob(f"*/{RECORD}"):
            try:
                batches.append(self._read(path))
            except InfrastructureError:
                continue
        return sorted(batches, key=lambda batch: batch.created_at)

    def note_cancelled(self, batch: Batch, keys: Iterable[str]) -> None:
        """Records which runs the operator cancels. Must be called before they are cancelled in the queue.

        The queue alone does not tell: a worker that is stopped also cancels its runs there, to requeue them. And a run
        may not be in the queue yet.
        """
        with locked(self.directory(batch.id) / LOCK):
            cancelled = sorted(self.noted_cancelled(batch).union(keys))
            write_atomically(self.directory(batch.id) / CANCELLED, json.dumps(cancelled))

    def forget_cancelled(self, batch: Batch) -> None:
        """Forgets the operator's cancellations, as the batch is resumed."""
        (self.directory(batch.id) / CANCELLED).unlink(missing_ok=True)

    def noted_cancelled(self, batch: Batch) -> frozenset[str]:
        """Returns the keys of the runs that the operator cancelled, also of those that are not in the queue yet."""
        path = self.directory(batch.id) / CANCELLED
        try:
            return strict_json.load_file(frozenset[str], path)
        except FileNotFoundError:
            return frozenset()
        except (OSError, ValueError) as error:
            raise _unreadable("The note of what was cancelled", path, error) from error

    def cancelled(self, batch: Batch) -> frozenset[str] | None:
        """Returns the keys of the runs that the operator cancelled.

        None means that the queue's word is enough: it is not shared, so that no worker requeues runs.
        """
        return self.noted_cancelled(batch) if batch.shared else None

    def write_results(self, batch: Batch, rows: list[Row], *, if_none_is_lost: bool = False) -> None:
        """Writes results.jsonl and results.csv, and seals both. Other processes wait.

        Args:
            if_none_is_lost: whether to write nothing where more rows are written already.

        Raises:
            InfrastructureError: it cannot be read how many are written already.
        """
        directory = self.directory(batch.id)
        with locked(directory / LOCK):
            if if_none_is_lost and len(rows) < len(self._lines(batch)):
                return
            write_atomically(self._results(batch), as_jsonl(rows))
            write_atomically(directory / "results.csv", as_csv(rows))
            facts = {"batch": batch.id, "suite": batch.suite.name, "runs": len(batch.runs), "version": batch.version}
            seal(directory, facts, write_atomically, ("results.csv", "results.jsonl"))

    def results(self, batch: Batch) -> list[Row]:
        """Returns the rows as they were last written.

        Raises:
            InfrastructureError: they cannot be read.
        """
        try:
            return [strict_json.load_record(Row, line) for line in self._lines(batch)]
        except ValueError as error:
            raise _unreadable("The results", self._results(batch), error) from error

    def _results(self, batch: Batch) -> Path:
        return self.directory(batch.id) / "results.jsonl"

    def _lines(self, batch: Batch) -> list[bytes]:
        """Returns the lines of the results, one for each row, whether or not they can be read as rows."""
        path = self._results(batch)
        try:
            return [line for line in path.read_bytes().split(b"\n") if line] if path.exists() else []
        except OSError as error:
            raise _unreadable("The results", path, error) from error

    def _read(self, path: Path) -> Batch:
        try:
            return strict_json.load_file(Batch, path)
        except (OSError, ValueError) as error:
            raise _unreadable("The record", path, error) from error


def _unreadable(what: str, path: Path, error: Exception) -> InfrastructureError:
    if isinstance(error, OSError):
        return InfrastructureError(f"{what} {path} cannot be read: {error.strerror or error}.")
    return InfrastructureError(
        f"{what} {path} cannot be read: {type(error).__name__}.",
        hint="It was changed by hand, written by another version of provisioner, or is damaged.",
        details=str(error)[:DETAILS_CHARACTERS],
    )
