"""What a process needs to work on one batch: the session and the families. Prepares images and makes attempts."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from provisioner.base.clock import parse_duration
from provisioner.base.config import Settings
from provisioner.base.errors import InfrastructureError
from provisioner.base.models import Record
from provisioner.base.progress import Progress, Silence
from provisioner.batch.attempt import Attempt
from provisioner.batch.live_status import ActiveRun, LiveStatus, RunProgress
from provisioner.batch.suite import Run, Suite, expand, family_directories
from provisioner.clouds.cloud import Cloud
from provisioner.clouds.registry import Where, open_cloud
from provisioner.costs.ledger import Ledger, Spending
from provisioner.environment import planning
from provisioner.environment.allowlist import parse_destination, resolve
from provisioner.environment.planning import Forecast, forecast
from provisioner.family.check import refuse_mistakes
from provisioner.family.env_file import load_env_file
from provisioner.family.loader import TaskFamily, load_family, refuse_env_file_inside
from provisioner.images import build
from provisioner.machines.apply_batcher import ApplyBatcher
from provisioner.session import Session
from provisioner.store.home import Home


class TaskForecast(Record):
    """What all runs of one task would take.

    Args:
        task: None if the family's tasks are not known, as its image is not built; runs and forecast are None, too.
        runs: how many there would be.
        forecast: of a single environment.
    """

    family: str
    task: str | None
    runs: int | None
    forecast: Forecast | None


class BatchContext:
    """The session and the families of a batch, in this process. Safe to use from any thread.

    Args:
        directory: the suite file's directory, to which its paths are relative.
        batch: the batch's id.
        database: URL of the database with the ledger, if it is shared.

    Raises:
        UsageError: the suite names something that does not exist, or that the cloud does not offer.
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
            cloud=open_cloud(home, settings.requiring_kvm(suite.require_kvm), where),
            progress=progress or Silence(),
            variables=load_env_file(env_file) if env_file else {},
            ca_bundle=settings.ca_bundle_path,
            base_image=settings.base_image,
            ttl=parse_duration(suite.limits.ttl),
            time_limits=settings.time_limits,
            spending=Spending.of(settings, suite.budget).model_copy(update={"command": batch, "batch": batch}),
            database=database,
            record=suite.record,
        )
        self._env_file = env_file
        self._clouds = [self.session.cloud]
        self._families: dict[str, TaskFamily] = {}
        self._mutex = threading.Lock()
        self._allowed = resolve([parse_destination(text) for text in suite.allow])
        self.session.cloud.check_allowlist(self._allowed)

    def family(self, path: str) -> TaskFamily:
        """Returns the family in a directory, which is read only once.

        Raises:
            UsageError: it is not valid, or the suite's env file lies in it.
        """
        with self._mutex:
            if path not in self._families:
                family = load_family(Path(path))
                if self._env_file:
                    refuse_env_file_inside(family, self._env_file)
                self._families[path] = family
            return self._families[path]

    def prepare(self) -> list[Run]:
        """Builds the family images that are missing, and returns the suite's runs.

        Raises:
            UsageError: a task does not exist, variables are missing, or the cloud cannot provide the machines.
            ImageBuildError: an image could not be built.
        """
        wanted = family_directories(self.suite, self.directory)
        # All are checked before the first image is built.
        checked = {path: refuse_mistakes(self.family(path), None, self.session.variables) for path in wanted}
        known = {path: each.tasks for path, each in checked.items() if each.tasks is not None}
        expand(self.suite, known, {path: wanted[path] for path in known})
        tasks = {path: list(build.family_image(self.session, self.family(path))[1].tasks) for path in wanted}
        runs = expand(self.suite, tasks, wanted)
        for path, task in dict.fromkeys((run.family, run.task) for run in runs):
            planning.plan(self.session, self.family(path), task)
        return runs

    def forecasts(self) -> list[TaskForecast]:
        """Estimates what each task's runs would take and cost, as far as that is known without building an image.

        Raises:
            UsageError: a task does not exist, or the cloud cannot provide the machines.
        """
        wanted = family_directories(self.suite, self.directory)
        return [task for path, globs in wanted.items() for task in self._family_forecasts(path, globs)]

    def capacity(self, tasks: Iterable[TaskForecast]) -> int | None:
        """Returns for how many environments of the largest of these tasks there is room at once everywhere.

        None if that is not known, or if nothing is scarce. What the batch's other controllers have is not known.
        """
        scarcity = self.session.cloud.scarcity
        if scarcity and scarcity.each_controller and self.session.database:
            return None
        counts = []
        for sizes in {str(task.forecast.machines): task.forecast.machines for task in tasks if task.forecast}.values():
            count = 0
            cloud: Cloud | None = self.session.cloud
            while cloud:
                here = cloud.capacity(sizes)
                if here is None:
                    return None
                count, cloud = count + here, cloud.fallback()
            counts.append(count)
        return min(counts, default=None)

    def _family_forecasts(self, path: str, globs: tuple[str, ...]) -> list[TaskForecast]:
        family = self.family(path)
        unknown = [TaskForecast(family=family.name, task=None, runs=None, forecast=None)]
        image = build.built_family_image(self.session, family)
        checked = refuse_mistakes(family, None, self.session.variables if self._env_file else None)
        try:
            built = self.session.images.setup_data(image).tasks if image else None
        except InfrastructureError as error:
            self.session.progress.note(f"{error.message} {error.hint or ''}".rstrip())
            return unknown
        tasks = list(checked.tasks or family.manifest.tasks) if built is None else list(built)
        if not tasks:
            return unknown
        runs = expand(self.suite, {path: tasks}, {path: globs})
        return [
            TaskForecast(
                family=family.name,
                task=task,
                runs=sum(run.task == task for run in runs),
                forecast=forecast(self.session, family, task, checked, allowlist=bool(self.suite.allow)),
            )
            for task in dict.fromkeys(run.task for run in runs)
        ]

    def new_attempt(
        self,
        suite: Suite,
        run: Run,
        number: int,
        shortages: int,
        live_status: LiveStatus,
        active_run: ActiveRun,
        apply_batcher: ApplyBatcher,
    ) -> Attempt:
        """Returns an attempt at a run.

        Args:
            suite: at least the part of the suite that the run needs.
            number: the attempt's, from 1.
            shortages: how many of the run's attempts found no capacity; each moves it on to the next place.
        """
        active_run.attempt = number
        session = replace(
            self.session,
            cloud=self._cloud(shortages),
            progress=RunProgress(live_status, active_run),
            check=active_run.check,
            shield=active_run.shield,
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

    def _cloud(self, shortages: int) -> Cloud:
        """Returns the cloud in the place to use after so many shortages; the last place is used again and again."""
        with self._mutex:
            while len(self._clouds) <= shortages and (fallback := self._clouds[-1].fallback()):
                self._clouds.append(fallback)
            return self._clouds[min(shortages, len(self._clouds) - 1)]


def batch_costs(ledger: Ledger, batch: str) -> tuple[int, int]:
    """Returns what a batch has reserved and what it has spent, each in millionths of a US dollar."""
    entries = ledger.entries(batch=batch)
    reserved = sum(entry.reserved_micro_usd for entry in entries if entry.actual_micro_usd is None)
    return reserved, sum(entry.actual_micro_usd or 0 for entry in entries)
