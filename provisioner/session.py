"""What every operation needs: home, cloud, settings, secrets and who watches. Made once per command."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from pathlib import Path

from provisioner.clouds.cloud import Cloud
from provisioner.costs.budgets import Spending
from provisioner.costs.ledger import Ledger
from provisioner.models import Phase
from provisioner.progress import Progress, Silence
from provisioner.redaction import Redactor
from provisioner.signals import go_on, no_shield
from provisioner.store.environments import EnvironmentStore
from provisioner.store.home import Home
from provisioner.store.images import ImageStore
from provisioner.store.leases import Leases
from provisioner.ttl import BUILDER_LIMIT, DEFAULT_LIMIT


@dataclass(frozen=True)
class Session:
    """The context of one command.

    Args:
        home: the provisioner home.
        cloud: where machines run.
        progress: who watches.
        variables: the environment file's secrets.
        shield: keeps signals from cutting a clean-up short.
        ca_bundle: PEM file of extra CA certificates that images trust.
        limit: how long an environment of this command may live.
        builder_limit: how long a machine in which an image is built may live.
        spending: what this command may spend.
        leases: the environments that this process looks after.
        check: asked again and again while something lasts; it raises when that shall stop. Not while `shield` holds.
        database: the Postgres database that keeps the ledger, as a URL; empty: a file in the home.
    """

    home: Home
    cloud: Cloud
    progress: Progress = field(default_factory=Silence)
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    shield: Callable[[], AbstractContextManager[None]] = no_shield
    ca_bundle: Path | None = None
    limit: timedelta = DEFAULT_LIMIT
    builder_limit: timedelta = BUILDER_LIMIT
    spending: Spending = field(default_factory=Spending)
    leases: Leases = field(default_factory=Leases)
    check: Callable[[], None] = go_on
    database: str = field(default="", repr=False)

    @cached_property
    def environments(self) -> EnvironmentStore:
        """The records of environments."""
        return EnvironmentStore(self.home)

    @cached_property
    def images(self) -> ImageStore:
        """The finished images."""
        return ImageStore(self.home)

    @cached_property
    def ledger(self) -> Ledger:
        """What launches may cost and did cost."""
        if self.database:
            from provisioner.costs.ledger_postgres import (
                PostgresLedger,  # its driver takes its time, and only this needs it
            )

            return PostgresLedger(self.database)
        return Ledger(self.home.ledger)

    @cached_property
    def redactor(self) -> Redactor:
        """Takes the secrets out of what is shown or kept."""
        return Redactor(self.variables)

    def output(self, text: str) -> None:
        """Passes a machine's output on to who watches, as it is: an OutputTee has taken the secrets out before."""
        self.progress.output(text)


class Phases:
    """Times the phases of one environment's life and tells who watches."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.finished: list[Phase] = []

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times what happens inside; a phase that fails is not counted as finished."""
        self._progress.phase_started(name)
        begin = time.monotonic()
        yield
        seconds = round(time.monotonic() - begin, 3)
        self.finished.append(Phase(name=name, seconds=seconds))
        self._progress.phase_finished(name, seconds)
