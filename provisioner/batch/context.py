"""What one process works on one batch with: its session, families, agents, and the attempts that it makes of them."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

from provisioner.batch.apply_batcher import ApplyBatcher
from provisioner.batch.attempts import Attempt
from provisioner.batch.live_status import ActiveRun, LiveStatus, RunProgress
from provisioner.batch.suite import Run, Suite, expand, family_directories
from provisioner.clouds.cloud import Cloud
from provisioner.clouds.registry import Where, open_cloud
from provisioner.config import Settings
from provisioner.costs.budgets import Spending
from provisioner.costs.ledger import Ledger
from provisioner.environment import lifecycle
from provisioner.environment.allowlist import parse_destination, resolve
from provisioner.environment.estimate import Forecast, forecast
from provisioner.family.env_file import load_env_file
from provisioner.family.loader import TaskFamily, load_family, refuse_env_file_inside
from provisioner.images import build
from provisioner.models import Record
from provisioner.progress import Progress, Silence
from provisioner.session import Session
from provisioner.store.home import Home
from provisioner.ttl import parse_duration


class BatchContext:
    """A batch, as this process works on it.

    Args:
        directory: the suite file's, from which its paths start.
        batch: the batch's id.
        database: of the ledger, if it is shared.

    Raises:
        UsageError: the suite names something that is not there, or that the cloud does not know.
    """

    def __init__(
        self,
        home: Home,
        settings: Settings,
        suite: Suite,
        directory: Path,
        batch: str,
        *,
        database: str = "",
        progress: Progress | None = None,
    ) -> None:
        self.suite = suite
        self.directory = directory
        self.batch = batch
        env_file = directory / suite.env_file if suite.env_file else None
        where = Where(suite.cloud, suite.regions, spot=suite.spot)
        self.session = Session(
            home=home,
            cloud=open_cloud(home, settings, where),
            progress=progress or Silence(),
            variables=load_env_file(env_file) if env_file else {},
            ca_bundle=settings.ca_bundle_path,
            limit=parse_duration(suite.limits.ttl),
            spending=Spending.of(settings, suite.budget).model_copy(update={"command": batch, "batch": batch}),
            database=database,
        )
        self._env_file = env_file
        self._clouds = [self.session.cloud]
        self._families: dict[str, TaskFamily] = {}
        self._mutex = threading.Lock()
        self._allowed = resolve([parse_destination(text) for text in suite.allow])

    def family(self, path: str) -> TaskFamily:
        """The family in a directory, read once.

        Raises:
            UsageError: it is not valid, or the suite's secrets lie in it.
        """
        with self._mutex:
            if path not in self._families:
                loaded = load_family(Path(path))
                if self._env_file:
                    refuse_env_file_inside(loaded, self._env_file)
                self._families[path] = loaded
            return self._families[path]

    def prepare(self) -> list[Run]:
        """Builds the images that are missing, and says which runs the suite means.

        Raises:
            UsageError: a task that there is not, missing variables, or machines that the cloud cannot give.
            ImageBuildError: an image could not be built.
        """
        wanted = family_directories(self.suite, self.directory)
        for path in wanted:
            self.family(path)  # all are checked before the first image is built
        tasks = {path: list(build.family_image(self.session, self.family(path))[1].tasks) for path in wanted}
        runs = expand(self.suite, tasks, wanted)
        for path, task in dict.fromkeys((run.family, run.task) for run in runs):
            lifecycle.plan(self.session, self.family(path), task)
        return runs

    def forecasts(self) -> list[TaskForecast]:
        """What would run and cost, as far as that is known without building anything.

        Raises:
            UsageError: a task that there is not, or machines that the cloud cannot give.
        """
        wanted = family_directories(self.suite, self.directory)
        found = []
        for path, globs in wanted.items():
            family = self.family(path)
            image = build.built_family_image(self.session, family)
            tasks = list(self.session.images.setup_data(image).tasks) if image else list(family.manifest.tasks)
            if not tasks:
                found.append(TaskForecast(family=family.name, task=None, runs=None, forecast=None))
                continue
            known = Suite.model_validate(self.suite.model_dump() | {"families": [{"path": path, "tasks": globs}]})
            runs = expand(known, {path: tasks}, {path: globs})
            for task in dict.fromkeys(run.task for run in runs):
                count = sum(run.task == task for run in runs)
                told = forecast(self.session, family, task)
                found.append(TaskForecast(family=family.name, task=task, runs=count, forecast=told))
        return found

    def attempt(
        self,
        suite: Suite,
        run: Run,
        number: int,
        shortages: int,
        live_status: LiveStatus,
        running: ActiveRun,
        apply_batcher: ApplyBatcher,
    ) -> Attempt:
        """An attempt at a run.

        Args:
            suite: as far as the run needs it.
            shortages: how often clouds had no capacity for it: the next place is tried.
        """
        running.attempt = number
        session = replace(
            self.session,
            cloud=self._cloud(shortages),
            progress=RunProgress(live_status, running),
            check=running.check,
            shield=running.shield,
        )
        return Attempt(
            session=session,
            batch=self.batch,
            suite=suite,
            directory=self.directory,
            run=run,
            family=self.family(run.family),
            allowed=self._allowed,
            number=number,
            create=apply_batcher.create,
        )

    def spent(self) -> tuple[int, int]:
        """What the batch holds and has spent, in millionths of a US dollar."""
        return money_of(self.session.ledger, self.batch)

    def _cloud(self, shortages: int) -> Cloud:
        with self._mutex:
            while len(self._clouds) <= shortages and (more := self._clouds[-1].fallback()):
                self._clouds.append(more)
            return self._clouds[min(shortages, len(self._clouds) - 1)]


def money_of(ledger: Ledger, batch: str) -> tuple[int, int]:
    """What a batch holds and has spent, in millionths of a US dollar."""
    entries = ledger.entries(batch=batch)
    held = sum(entry.held_micro_usd for entry in entries if entry.actual_micro_usd is None)
    return held, sum(entry.actual_micro_usd or 0 for entry in entries)


class TaskForecast(Record):
    """What the runs of one task would be.

    Args:
        task: None while nobody knows the family's tasks: its image is not built. Then the others are None, too.
        forecast: of one of its environments.
    """

    family: str
    task: str | None
    runs: int | None
    forecast: Forecast | None
