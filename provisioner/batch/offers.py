"""Decides which jobs of a queue this process works on: any user of the queue's database can change any job.

A job is never trusted for what it names: a batch's controller works only on the jobs of its own record, and a worker
only with directories, env files and destinations that it was told to offer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from provisioner.base.errors import UsageError
from provisioner.batch.records import Batch, Job, jobs_of
from provisioner.environment.allowlist import parse_destination

CheckJob = Callable[[Job], None]

# A batch's id is a suite's name, a time and a suffix (store.environments.new_id).
_BATCH = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")


def only_of(batch: Batch) -> CheckJob:
    """Returns a check that accepts the jobs of one batch alone, exactly as its record has them.

    Raises:
        UsageError: by the check, for any other job.
    """
    jobs = jobs_of(batch)

    def check(job: Job) -> None:
        if job != jobs.get(job.run.key):
            raise UsageError(
                f"The queue's job is not the one that {batch.id} queued: another user of the database changed it."
            )

    return check


@dataclass(frozen=True)
class Offer:
    """What a worker offers to the jobs of a shared queue.

    Args:
        families: directories of families, or directories that contain them.
        agents: directories of agents, or directories that contain them.
        env_files: files with tasks' secrets.
        allow: destinations that environments without internet may reach, as HOST:PORT.
    """

    families: tuple[Path, ...]
    agents: tuple[Path, ...] = ()
    env_files: tuple[Path, ...] = ()
    allow: tuple[str, ...] = ()

    def check(self, job: Job) -> None:
        """Checks that a job names only what is offered, and that its names agree with each other.

        Raises:
            UsageError: it names something else; the message says what, and which option would offer it.
        """
        run, suite = job.run, job.suite
        family = Path(run.family)
        _require_consistent(job)
        _require_inside(family, self.families, "family", "--families")
        for agent in suite.agents:
            _require_inside(Path(job.directory) / agent.directory, self.agents, "agent", "--agents")
        if suite.env_file:
            path = Path(job.directory) / suite.env_file
            if _resolved(path) not in [_resolved(offered) for offered in self.env_files]:
                raise UsageError(f"The job's env file {path} is not offered by this worker (--env-file).")
        offered = {parse_destination(text) for text in self.allow}
        if denied := [text for text in suite.allow if parse_destination(text) not in offered]:
            raise UsageError(f"The job's destination {denied[0]} is not offered by this worker (--allow).")


def _require_consistent(job: Job) -> None:
    """Checks that a job's batch id, key and agent agree: environments, tags and results are named after them."""
    run = job.run
    names = [*(agent.name for agent in job.suite.agents), *(entry.name for entry in job.suite.submissions)]
    key = f"{Path(run.family).name}/{run.task}/{run.agent}/{run.repetition}"
    if not _BATCH.fullmatch(job.batch) or run.key != key or names != [run.agent]:
        raise UsageError("The job's names do not agree with each other: another user of the database changed it.")


def _require_inside(path: Path, offered: tuple[Path, ...], kind: str, option: str) -> None:
    """Checks that a path, with all links followed, lies in one of the directories."""
    resolved = _resolved(path)
    if not path.is_absolute() or not any(resolved.is_relative_to(_resolved(directory)) for directory in offered):
        raise UsageError(f"The job's {kind} {path} is outside the directories that this worker offers ({option}).")


def _resolved(path: Path) -> Path:
    """Returns a path with all links followed.

    Raises:
        UsageError: it cannot be followed.
    """
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # links in a circle, a NUL character
        raise UsageError("A path of the job cannot be followed.") from error
