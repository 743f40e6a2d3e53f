"""Makes Inspect's samples of a task family's tasks."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from inspect_ai.dataset import Sample
from inspect_ai.util import SandboxEnvironmentSpec

from provisioner.errors import UsageError
from provisioner.family.checks.family_check import refuse_mistakes
from provisioner.family.loader import TaskFamily, load_family, refuse_env_file_inside
from provisioner.images import build
from provisioner.inspect.configuration import Configuration, written
from provisioner.inspect.failures import before_samples, told_in_full
from provisioner.inspect.heartbeat import told
from provisioner.inspect.origin import Origin
from provisioner.inspect.sample import CHECKED, open_session
from provisioner.models import SetupData
from provisioner.session import Session
from provisioner.signals import Interrupts


class FamilySamples:
    """A family whose image is built, so that its tasks are known.

    Args:
        directory: the family's directory.
        secrets_env_path: the file with its secrets; empty for none.
        cloud, ttl, fork: as in the configuration.
        budget: as in the configuration; "" for none, as an empty argument of Inspect's command line is None.
        named: the tasks that are to be run; none for all.

    Raises:
        PreparationError: the family is not valid, surely fails, or has no such task.
        ProvisionerError: its image could not be built.
    """

    def __init__(
        self,
        directory: Path,
        secrets_env_path: str,
        cloud: str,
        ttl: str,
        named: Sequence[str] = (),
        fork: str = "none",
        budget: float | str | None = "",
    ) -> None:
        with before_samples(), told_in_full():
            self.family: TaskFamily = load_family(directory.expanduser().absolute())
            secrets = str(Path(secrets_env_path).expanduser().absolute()) if secrets_env_path else ""
            if secrets:
                refuse_env_file_inside(self.family, Path(secrets))
            common = {
                "family": str(self.family.directory),
                "cloud": cloud,
                "ttl": ttl,
                "env_file": secrets,
                "fork": fork,
                **({} if budget == "" else {"budget": budget}),
            }
            self._configuration = partial(_configuration, common)
            session = open_session(self._configuration("any"), Origin(self.family.name))
            # Once: it reads the whole family. Of several names, the text or the built image tells which are unknown.
            task = named[0] if len(set(named)) == 1 else None
            checked = refuse_mistakes(self.family, task, session.variables)
            if checked.tasks is not None:
                self._refuse_unknown(named, checked.tasks)
            CHECKED.add((self.family.directory, secrets))
        # Inspect makes tasks in its event loop's own thread, and must know their samples before it continues.
        with before_samples(), told_in_full(session.redactor), interruptible(session) as watched:
            with told(session.progress, "its image is ready"):
                self._setup: SetupData = build.family_image(watched, self.family)[1]
            self._refuse_unknown(named, self._setup.tasks)
        self.tasks = list(named) or sorted(self._setup.tasks)

    def _refuse_unknown(self, named: Sequence[str], known: Collection[str]) -> None:
        if unknown := [name for name in named if name not in known]:
            listed = ", ".join(sorted(known))
            raise UsageError(f"{self.family.name} has no task {', '.join(unknown)}. It has {listed}.")

    def sample(
        self, task: str, identity: str = "", actions: Sequence[Any] = (), expected_score: float | None = None
    ) -> Sample:
        """Returns the sample of one task.

        Args:
            identity: the sample's id; empty for the task's name.
            actions, expected_score: of a replay.
        """
        data = self._setup.tasks[task]
        return Sample(
            id=identity or task,
            input=data.instructions,
            metadata={
                "task_name": task,
                "task_family": self.family.name,
                "actions": list(actions),
                "expected_score": expected_score,
                "instructions": data.instructions,
                "permissions": list(data.permissions),
                "provisioner": {
                    "has_aux_vm": data.aux_vm_spec is not None,
                    "has_intermediate_score": self._setup.has_intermediate_score,
                    "scoring_visible_to_agent": self.family.manifest.scoring(task).visible_to_agent,
                },
            },
            sandbox=SandboxEnvironmentSpec("provisioner", self._configuration(task)),
        )


@contextlib.contextmanager
def interruptible(session: Session) -> Iterator[Session]:
    """Has Ctrl-C end work that keeps the event loop's thread, and lets it clean up.

    The loop's own handler would only take note of a first Ctrl-C, and act once the work is done.

    Returns:
        the session for that work.
    """
    if threading.current_thread() is not threading.main_thread():
        yield session
        return
    interrupts = Interrupts(session.progress.note)
    with interrupts.installed():
        yield replace(session, shield=interrupts.shield)


def _configuration(common: Mapping[str, Any], task: str) -> Configuration:
    return written({**common, "task": task}, "The configuration by the task's arguments")
