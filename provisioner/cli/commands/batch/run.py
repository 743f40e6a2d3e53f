"""The command `batch run`: a suite, to its end."""

from __future__ import annotations

from provisioner.base.clock import now
from provisioner.batch.records import Batch, Batches
from provisioner.batch.suite import load_suite
from provisioner.cli.command import progress
from provisioner.cli.commands.batch.controller import run_batch
from provisioner.cli.commands.batch.lookup import DatabaseOption, batch_context
from provisioner.cli.commands.batch.plan import SuiteArgument, too_many, within
from provisioner.cli.options import NoRecordOption
from provisioner.cli.output import Result
from provisioner.store.environments import new_id
from provisioner.version import __version__


def main(suite: SuiteArgument, no_record: NoRecordOption = False, database: DatabaseOption = "") -> Result:
    """Builds the images, and then works on all runs of a suite."""
    loaded = load_suite(suite)
    if no_record:
        loaded = loaded.model_copy(update={"record": False})
    batch_id = new_id(loaded.name, None)
    path = suite.absolute()
    context = batch_context(loaded, path, batch_id, database)
    runs = context.prepare()
    capacity = context.capacity(context.forecasts())
    scarcity, wanted = context.session.cloud.scarcity, min(loaded.concurrency, len(runs))
    if scarcity and capacity is not None and capacity < wanted:
        progress().note(too_many(wanted, capacity, scarcity))
    batch = Batch(
        id=batch_id, suite=within(loaded, capacity), suite_file=str(path), shared=bool(database), created_at=now(),
        version=__version__, runs=tuple(runs),
    )  # fmt: skip
    Batches(context.session.home).save(batch)
    progress().note(f"Batch {batch_id}: {len(runs)} runs. `provisioner batch status {batch_id}` shows them")
    return run_batch(batch, context)
