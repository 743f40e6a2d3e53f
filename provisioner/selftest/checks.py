"""What the self-test does with environments: brings them up, scores, reboots, lets them expire, and clears them away.

Each function returns what it found, raises a ProvisionerError where the cloud does something else than it must, and
leaves no environment.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta

from provisioner.base.clock import now
from provisioner.base.errors import HostError, InfrastructureError, ProvisionerError, ShortageError
from provisioner.base.models import Destination, Environment
from provisioner.base.signals import wait
from provisioner.environment import lifecycle, planning
from provisioner.family.loader import TaskFamily
from provisioner.machines.apply_batcher import ApplyBatcher, host_slots
from provisioner.machines.connect import connect
from provisioner.machines.launch import looked_after, tell_of_destruction
from provisioner.session import Phases, Session
from provisioner.store.environments import new_id
from provisioner.terraform import process

BOOT_ID = ["cat", "/proc/sys/kernel/random/boot_id"]
# What ends a machine at its time, inside of it.
TIMER = ["systemctl", "is-active", "provisioner-ttl.timer"]
REBOOT_SECONDS = 600.0
EXPIRY = timedelta(minutes=1)
# EventBridge Scheduler may be a minute late, and EC2 takes minutes to end a machine.
EXPIRY_SECONDS = 900.0
PAUSE_SECONDS = 3.0


@dataclass(frozen=True)
class Combination:
    """One kind of environment.

    Args:
        internet: offline, allowlist or online.
        aux: whether it has an aux VM.
        spot: whether it asks the spot market first.
    """

    internet: str
    aux: bool
    spot: bool

    @property
    def name(self) -> str:
        """A few words for the operator."""
        parts = (self.internet, "with an aux VM" if self.aux else "one machine", "spot" if self.spot else "on demand")
        return ", ".join(parts)

    @property
    def task(self) -> str:
        """The task of the self-test's family."""
        return ("online" if self.internet == "online" else "offline") + ("-aux" if self.aux else "")


ALL_COMBINATIONS = tuple(
    Combination(internet, aux, spot)
    for spot in (False, True)
    for internet in ("offline", "allowlist", "online")
    for aux in (False, True)
)


def ready(session: Session) -> str:
    """Checks the controller, the credentials, their rights and the account's roles."""
    problems = [*process.problems(session.cloud.least_terraform), *session.cloud.problems()]
    for problem, remedy in problems:
        raise HostError(problem, hint=remedy)
    return " ".join(session.cloud.notes()) or "ready"


def build(session: Session, family: TaskFamily) -> str:
    """Builds the images of all tasks, unless they exist."""
    names = {
        record.image
        for task in ("offline", "offline-aux")
        for record in planning.plan(session, family, task).records.values()
    }
    return f"images {', '.join(sorted(names))}"


@looked_after
def rights(session: Session, family: TaskFamily) -> str:
    """Asks for dry runs of what provisioner does with an environment's resources."""
    with _environment(session, family, "offline") as environment:
        if missing := session.cloud.missing_rights(environment):
            raise InfrastructureError(
                f"The credentials lack {len(missing)} rights.",
                hint="`provisioner aws policy launch` and `... manage` print the policies with all of them.",
                details="\n".join(missing),
            )
    return "nothing is refused"


@looked_after
def live(session: Session, family: TaskFamily, combination: Combination, destination: Destination) -> str:
    """Brings up an environment, with its isolation proven, scores it and destroys it."""
    allowed = (destination,) if combination.internet == "allowlist" else ()
    with _environment(session, family, combination.task, allowed) as environment:
        _require_full_score(session, environment)
    return f"{environment.id} came up, was scored and is gone"


@looked_after
def reboot(session: Session, family: TaskFamily) -> str:
    """Reboots a machine. It must come back with the host key that was pinned, and still end at its time."""
    with _environment(session, family, "offline") as environment:
        with connect(session, environment, "primary") as connection:
            before = connection.run(BOOT_ID).stdout
            connection.run(["systemd-run", "--on-active=1", "systemctl", "reboot"])
        begin = time.monotonic()
        while not _has_rebooted(session, environment, before):
            if time.monotonic() - begin > REBOOT_SECONDS:
                raise InfrastructureError(f"{environment.id} did not come back within {REBOOT_SECONDS:.0f} seconds.")
            wait(PAUSE_SECONDS, session.check)
        seconds = time.monotonic() - begin
        _require_full_score(session, environment)
    return f"back after {seconds:.0f} s with the same host key, and its time limit in force"


@looked_after
def expiry(session: Session, family: TaskFamily) -> str:
    """Moves an environment's end to a minute from now, and waits for the cloud to end it."""
    with _environment(session, family, "offline") as environment:
        sooner = session.environments.update(environment, expires_at=now() + EXPIRY)
        session.cloud.move_ttl(sooner)
        begin = time.monotonic()
        while session.cloud.alive(sooner, "primary"):
            if time.monotonic() - begin > EXPIRY_SECONDS:
                raise InfrastructureError(f"{environment.id} still runs {EXPIRY_SECONDS:.0f} s after its end was set.")
            wait(PAUSE_SECONDS, session.check)
        seconds = time.monotonic() - begin - EXPIRY.total_seconds()
    return f"ended {max(0.0, seconds):.0f} s after its time"


def crowd(session: Session, family: TaskFamily, count: int) -> str:
    """Brings up many environments at once, as a batch does, and destroys them.

    Raises:
        ShortageError: the account has no room for them; none was launched.
    """
    planned = planning.plan(session, family, "offline")
    sizes = {role: record.size for role, record in planned.records.items()}
    if shortage := session.cloud.shortage(sizes, count):
        remedy = f"{session.cloud.scarcity.remedy} " if session.cloud.scarcity else ""
        raise ShortageError(
            f"So many machines do not fit at once: {shortage}.",
            hint=f"{remedy}The steps that need fewer machines have passed.",
        )
    batcher = ApplyBatcher("selftest", host_slots())
    begin = time.monotonic()

    def live_and_die(_: int) -> float:
        identity = new_id(family.name, "offline")
        environment = lifecycle.launch(session, planned, identity, Phases(session.progress), batcher.create)
        seconds = time.monotonic() - begin
        _destroy(session, environment)
        return seconds

    with ThreadPoolExecutor(max_workers=count) as pool:
        futures = [pool.submit(live_and_die, number) for number in range(count)]
        seconds = sorted(future.result() for future in futures)
    return f"{count} were ready after {seconds[0]:.0f} to {seconds[-1]:.0f} s, and are gone"


def nothing_left(session: Session, family: TaskFamily) -> str:
    """Asks the cloud for what carries our marks and belongs to the self-test, and removes its image."""
    everything = session.cloud.list_resources([session.cloud.region])
    if left := [found.environment for found in everything if found.environment.startswith(family.name)]:
        names = ", ".join(left)
        raise InfrastructureError(f"Something is left of {names}.", hint="`provisioner sweep` removes it.")
    ours = [i for i in session.images.all() if (i.family, i.cloud) == (family.name, session.cloud.name)]
    session.images.remove(ours, session.cloud.discard)
    session.images.remove_unfinished()
    return "nothing is left but the base images and the region's network, which the next environment uses"


@contextlib.contextmanager
def _environment(
    session: Session, family: TaskFamily, task: str, allowed: tuple[Destination, ...] = ()
) -> Iterator[Environment]:
    """Yields an environment that is up, and destroys it, whatever happens."""
    environment = lifecycle.bring_up(session, family, task, allowed)
    try:
        yield environment
    except BaseException as error:
        tell_of_destruction(session, environment, error)
        with session.shield():
            lifecycle.destroy(session, environment)
        raise
    with session.shield():
        _destroy(session, environment)


def _destroy(session: Session, environment: Environment) -> None:
    """Destroys an environment, and checks that cloud and ledger have nothing open of it."""
    lifecycle.destroy(session, environment)
    if remaining := session.cloud.remaining(environment):
        raise InfrastructureError(f"{environment.id} was destroyed, and still there is {', '.join(remaining)}.")
    if any(entry.environment == environment.id for entry in session.ledger.entries(unsettled=True)):
        raise InfrastructureError(f"{environment.id} was destroyed, and its reservation is still open.")


def _require_full_score(session: Session, environment: Environment) -> None:
    _, outcome = lifecycle.score(session, environment, "")
    if outcome.score != 1.0:
        raise InfrastructureError(f"{environment.id} was scored {outcome.score} ({outcome.message or outcome.kind}).")


def _has_rebooted(session: Session, environment: Environment, before: bytes) -> bool:
    with contextlib.suppress(ProvisionerError), connect(session, environment, "primary") as connection:
        if connection.run(BOOT_ID).stdout != before:
            return connection.run(TIMER).exit_code == 0
    return False
