"""The record of a batch: what was asked for, kept in the home before anything of it runs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from pydantic import ValidationError

from provisioner.batch.results import Row, as_csv, as_jsonl
from provisioner.batch.suite import Run, Suite
from provisioner.errors import InfrastructureError, UsageError
from provisioner.models import Record
from provisioner.store.files import write_atomically
from provisioner.store.home import Home

RECORD = "batch.json"
CANCELLED = "cancelled.json"


class Batch(Record):
    """A batch.

    Args:
        suite_file: where the suite was read; its paths are relative to that file's directory.
        shared: whether its queue and ledger are in a database that several controllers work on.
        version: of provisioner.
        runs: all of them, in the suite's order.
    """

    id: str
    suite: Suite
    suite_file: str
    shared: bool
    created_at: datetime
    version: str
    runs: tuple[Run, ...]


class Job(Record):
    """What whoever works on one run has to know.

    Args:
        batch: the batch's id.
        directory: the suite file's.
    """

    batch: str
    suite: Suite
    directory: str
    run: Run


class Batches:
    """The batches of a home."""

    def __init__(self, home: Home) -> None:
        self._root = home.batches

    def directory(self, batch_id: str) -> Path:
        """batches/ID: record, engine and results."""
        return self._root / batch_id

    def lock(self, batch_id: str) -> Path:
        """The file that the batch's only controller keeps locked; nobody does where the queue is shared."""
        return self.directory(batch_id) / "controller.lock"

    def save(self, batch: Batch) -> None:
        """Writes the record, and with it the batch's directory."""
        directory = self.directory(batch.id)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(directory / RECORD, batch.model_dump_json(indent=2))

    def find(self, name: str) -> Batch:
        """The batch with this id, or the only one whose id starts or ends with it.

        Raises:
            UsageError: there is none, or more than one.
            InfrastructureError: its record cannot be read.
        """
        known = sorted(path.parent.name for path in self._root.glob(f"*/{RECORD}"))
        matches = [one for one in known if name and (one.startswith(name) or one.endswith(name))]
        if name in known:
            matches = [name]
        if not matches:
            raise UsageError(f"There is no batch {name!r}.", hint="`provisioner batch status` lists them.")
        if len(matches) > 1:
            raise UsageError(f"{name!r} could be any of: {', '.join(matches[:10])}.")
        return self._read(self.directory(matches[0]) / RECORD)

    def all(self) -> list[Batch]:
        """All batches whose records can be read, oldest first."""
        found = []
        for path in self._root.glob(f"*/{RECORD}"):
            try:
                found.append(self._read(path))
            except InfrastructureError:
                continue
        return sorted(found, key=lambda batch: batch.created_at)

    def note_cancelled(self, batch: Batch, keys: Iterable[str]) -> None:
        """Keeps which runs somebody cancelled, before they are: a worker's engine cancels those it hands back, too."""
        known = sorted({*(self.cancelled(batch) or ()), *keys})
        write_atomically(self.directory(batch.id) / CANCELLED, json.dumps(known))

    def forget_cancelled(self, batch: Batch) -> None:
        """They are to go on."""
        (self.directory(batch.id) / CANCELLED).unlink(missing_ok=True)

    def cancelled(self, batch: Batch) -> frozenset[str] | None:
        """The keys of runs that somebody cancelled; None: whatever the engine says is so, nobody hands back."""
        path = self.directory(batch.id) / CANCELLED
        if not batch.shared:
            return None
        return frozenset(json.loads(path.read_text())) if path.exists() else frozenset()

    def write_results(self, batch: Batch, rows: list[Row]) -> None:
        """Writes results.jsonl and results.csv."""
        write_atomically(self.directory(batch.id) / "results.jsonl", as_jsonl(rows))
        write_atomically(self.directory(batch.id) / "results.csv", as_csv(rows))

    def results(self, batch: Batch) -> list[Row]:
        """The rows that were written last."""
        path = self.directory(batch.id) / "results.jsonl"
        if not path.exists():
            return []
        return [Row.model_validate(json.loads(line)) for line in path.read_text().splitlines()]

    def _read(self, path: Path) -> Batch:
        try:
            return Batch.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            raise InfrastructureError(
                f"The record {path} cannot be read: {type(error).__name__}.",
                hint="It was changed by hand, written by another version of provisioner, or is damaged.",
                details=str(error),
            ) from error
