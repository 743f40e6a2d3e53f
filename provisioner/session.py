"""Bundles what every operation needs: home, cloud, settings, secrets and listener. Created once per command."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from provisioner.base.clock import BUILDER_TTL, DEFAULT_TTL
from provisioner.base.errors import extras_named, raised_in
from provisioner.base.models import Environment, Phase, PrimaryDistribution, Role, TimeLimits
from provisioner.base.progress import Progress, Silence, Steady
from provisioner.base.redaction import Redactor
from provisioner.base.signals import no_check, no_shield
from provisioner.clouds.cloud import Cloud
from provisioner.costs.ledger import Ledger, Spending
from provisioner.recording.calls import CallLog
from provisioner.recording.casts import Cast
from provisioner.store.environments import EnvironmentStore
from provisioner.store.files import Leases
from provisioner.store.home import Home
from provisioner.store.images import ImageStore

if TYPE_CHECKING:
    from provisioner.ssh.connection import Connection  # paramiko takes its time, and short commands do without


@dataclass(frozen=True)
class Session:
    """The context of one command.

    Args:
        home: the provisioner home.
        cloud: the cloud in which machines run.
        progress: the listener to which work reports.
        variables: the env file's secrets.
        shield: a context in which signals do not interrupt a clean-up.
        ca_bundle: PEM file of extra CA certificates that images trust.
        base_image: the base image of families whose manifest names none.
        ttl: the time to live of an environment of this command.
        keep_failed: whether an environment that fails to start, once it is proven isolated, is left to the operator.
        keep_builder: whether a builder in which something of the family's failed is left to the operator.
        builder_ttl: the time to live of a machine in which an image is built.
        time_limits: how long the family's code may run in an environment of this command.
        spending: the budgets of this command.
        leases: the leases of the environments that this process looks after.
        check: called regularly during long waits, except under `shield`; raises an exception to stop them.
        keep: takes over root's connections to machines that have come up, and closes them; None closes them at once.
        record: whether new environments are recorded: calls, terminals and packets.
        label: whose environments they are, in the words of the program that uses this one; empty for none.
        database: URL of the Postgres database with the ledger; empty for a file in the home.
    """

    home: Home
    cloud: Cloud
    progress: Progress = field(default_factory=Silence)
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    shield: Callable[[], AbstractContextManager[None]] = no_shield
    ca_bundle: Path | None = None
    base_image: PrimaryDistribution = "debian-12"
    ttl: timedelta = DEFAULT_TTL
    keep_failed: bool = False
    keep_builder: bool = False
    builder_ttl: timedelta = BUILDER_TTL
    time_limits: TimeLimits = field(default_factory=TimeLimits)
    spending: Spending = field(default_factory=Spending)
    leases: Leases = field(default_factory=Leases)
    check: Callable[[], None] = no_check
    keep: Callable[[Mapping[Role, Connection]], None] | None = None
    record: bool = True
    label: str = ""
    database: str = field(default="", repr=False)

    @cached_property
    def environments(self) -> EnvironmentStore:
        """The store of environments' records."""
        return EnvironmentStore(self.home)

    @cached_property
    def images(self) -> ImageStore:
        """The store of finished images."""
        return ImageStore(self.home)

    @cached_property
    def ledger(self) -> Ledger:
        """The ledger of launches, in the home or in the shared database."""
        if self.database:
            with extras_named():  # the driver is slow to import, and only this needs it
                from provisioner.costs.ledger_postgres import PostgresLedger

            return PostgresLedger(self.database)
        return Ledger(self.home.ledger)

    @cached_property
    def redactor(self) -> Redactor:
        """Redacts the session's secrets in text that is shown or stored."""
        return Redactor(self.variables)

    def calls(self, environment: Environment, role: Role) -> CallLog:
        """Returns what records the calls of a machine's exec server, if its environment is recorded."""
        return CallLog(self._recordings(environment), role, self.redactor)

    def cast(self, environment: Environment, kind: str, command: str = "", columns: int = 80, rows: int = 24) -> Cast:
        """Begins the recording of a terminal, or of a command's output, if the environment is recorded."""
        cast = Cast(self._recordings(environment), kind, self.redactor, command, columns=columns, rows=rows)
        if cast.problem:
            self.progress.note(f"Not recorded: {cast.problem}")
        return cast

    def _recordings(self, environment: Environment) -> Path | None:
        """The logs of an environment as long as it lives: what comes later is recorded nowhere."""
        return self.environments.live_logs(environment.id) if environment.recorded else None

    def steady(self) -> Session:
        """Returns this session with a listener whose errors are dropped, for a clean-up."""
        steady = copy.copy(self)  # with the ledger and the stores that are open
        object.__setattr__(steady, "progress", Steady(self.progress))
        return steady

    def output(self, text: str) -> None:
        """Passes a machine's output on to the listener. Redacts nothing: the caller must do that first."""
        self.progress.output(text)


class Phases:
    """Times the phases of one environment's life and reports them to the listener."""

    def __init__(self, progress: Progress) -> None:
        self._progress = Steady(progress)
        self.finished: list[Phase] = []

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times the body as a phase. A phase that fails does not count as finished."""
        self._progress.phase_started(name)
        begin = time.monotonic()
        with raised_in(name):
            yield
        seconds = round(time.monotonic() - begin, 3)
        self.finished.append(Phase(name=name, seconds=seconds))
        self._progress.phase_finished(name, seconds)
