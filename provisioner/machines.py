"""An environment's machines: created by one apply, reached over SSH, destroyed until the cloud says they are gone.

Knows nothing of tasks. Tasks' environments (lifecycle.py) and image builders (images.py) both stand on it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

from provisioner import holds
from provisioner.clock import now
from provisioner.clouds import UNFINISHED
from provisioner.errors import (
    CapacityError,
    HostError,
    InfrastructureError,
    MachineLostError,
    ProvisionerError,
    StillThereError,
    TerraformError,
)
from provisioner.models import Endpoint, Environment, Role, Status
from provisioner.remote.keys import ed25519_key_pair, rsa_key_pair
from provisioner.remote.ssh import Connection
from provisioner.session import Session
from provisioner.store.home import locked, write_atomically
from provisioner.terraform.render import EnvironmentSpec, MachineSpec, render_network, render_stack
from provisioner.terraform.stack import Stack

# Emulated, two machines on one busy core need about a minute; nothing healthy needs this long.
BOOT_SECONDS = 300
POLL_SECONDS = 1.0
# EC2 API reference, "Eventual consistency": seconds, as a rule.
SECOND_LOOK_SECONDS = 5.0
# Stacks of what environments share have names that begin so.
NETWORK_STACK = "network-"
AUX_USER = "admin"
# What a machine says of itself is worth some seconds; a hostile one may say nothing for ever, or too much.
JOURNAL_LINES = 5000
JOURNAL_SECONDS = 20.0
JOURNAL_BYTES = 2 << 20

T = TypeVar("T")


def record(session: Session, environment: Environment) -> None:
    """Writes the record, the keys and what the machines boot with. Nothing exists yet.

    Each environment has a controller key, and an RSA key that the task gets for its aux VM.
    """
    session.home.make()
    session.environments.save(environment)
    keys = {"controller": ed25519_key_pair()}
    if "aux" in environment.machines:
        keys["task"] = rsa_key_pair()
    session.environments.write_keys(environment.id, keys)
    controller = keys["controller"].public + "\n"
    authorized_keys: dict[Role, dict[str, str]] = {"primary": {"agent": controller}}
    if "aux" in environment.machines:
        authorized_keys["aux"] = {AUX_USER: controller + keys["task"].public + "\n"}
    session.cloud.prepare(environment, authorized_keys)


def create(session: Session, environments: list[Environment]) -> list[Environment]:
    """Creates the machines of one stack's environments with one apply, and one more for each lack of capacity.

    Args:
        environments: recorded ones, all of the same stack. What was placed before stays there: it may exist.

    Returns:
        their records, with endpoints.

    Raises:
        TerraformError: what exists by then is found by destroy.
        CapacityError: the same; the cloud has no machine to give.
    """
    cloud, stack = session.cloud, stack_of(session, environments[0])
    placed = {
        one.id: session.environments.update(one, placement=one.placement or cloud.place(one)) for one in environments
    }
    lay_foundation(session, next(iter(placed.values())))
    while True:
        stack.write(root_of(session, list(placed.values())))
        try:
            outputs = stack.apply(session.progress.note, cloud.parallelism)
            break
        except TerraformError as error:
            placed |= _elsewhere(session, placed, error)
    return [
        session.environments.update(one, endpoints=_endpoints(outputs, one), usd_per_hour=cloud.usd_per_hour(one))
        for one in placed.values()
    ]


def root_of(session: Session, environments: list[Environment]) -> dict[str, str]:
    """The files of the Terraform root of placed environments."""
    cloud = session.cloud
    specs = {one.id: _spec(session, one) for one in environments}
    return render_stack(cloud.name, specs) | cloud.root_files(environments[0])


def lay_foundation(session: Session, environment: Environment) -> None:
    """Makes what all environments of a place share, unless it is there; one controller of this home at a time."""
    cloud = session.cloud
    if (wanted := cloud.foundation(environment)) is None:
        return
    with locked(session.home.locks / f"foundation-{wanted.stack}"):
        if (wanted := cloud.foundation(environment)) is not None:
            session.progress.note("Making the network that all environments there share (once)")
            directory = session.home.stacks / wanted.stack
            stack, unfinished = Stack(directory), directory / UNFINISHED
            if unfinished.exists():
                session.progress.note("The last attempt was cut short; removing what it made")
                cloud.raze(environment)
            stack.write(render_network(cloud.name, wanted.values) | wanted.root_files)
            if wanted.new:
                write_atomically(unfinished, "")
            stack.apply(session.progress.note, cloud.parallelism)
            unfinished.unlink(missing_ok=True)


def _elsewhere(session: Session, placed: Mapping[str, Environment], error: TerraformError) -> dict[str, Environment]:
    """The environments that Terraform failed on, placed anew.

    Raises:
        TerraformError: their places are not to blame.
        CapacityError: there is nowhere else for some of them, and it names all of those.
    """
    moved = {}
    exhausted: dict[str, CapacityError] = {}
    for name in error.environments & placed.keys() or placed.keys():
        try:
            found = session.cloud.elsewhere(placed[name], error)
        except CapacityError as nowhere:
            exhausted[name] = nowhere
            continue
        if found is None:
            raise error
        reason, place = found
        session.progress.note(f"{name}: {reason}")
        moved[name] = session.environments.update(placed[name], placement=place)
    if exhausted:
        first = next(iter(exhausted.values()))
        first.environments = frozenset(exhausted)
        raise first from error
    return moved


def stack_of(session: Session, environment: Environment) -> Stack:
    """The Terraform root that the environment belongs to."""
    return Stack(session.home.stacks / environment.stack, check=session.check)


def _spec(session: Session, environment: Environment) -> EnvironmentSpec:
    values = session.cloud.stack_values(environment)
    images = values.pop("images")
    public_key = session.environments.key(environment.id, "controller").public
    return EnvironmentSpec(
        environment_id=environment.id,
        full_internet=environment.full_internet,
        allowed_destinations=environment.allowed_destinations,
        machines={
            role: MachineSpec(
                image=images[role],
                cpus=machine.size.cpus,
                memory_gib=machine.size.memory_gib,
                disk_gib=machine.size.disk_gib,
                public_key=public_key,
            )
            for role, machine in environment.machines.items()
        },
        extra=values,
    )


def _endpoints(outputs: Mapping[str, object], environment: Environment) -> dict[Role, Endpoint]:
    try:
        machines = outputs["environments"][environment.id]["machines"]  # type: ignore[index]
        return {role: Endpoint.model_validate(machines[role]) for role in environment.machines}
    except (KeyError, TypeError, ValueError) as error:
        raise InfrastructureError(
            f"Terraform gave no endpoints for {environment.id}.", hint="Its log lies in the stack's directory."
        ) from error


def connect(session: Session, environment: Environment, role: Role, user: str = "root") -> Connection:
    """Opens an SSH connection to a machine that is up.

    Raises:
        MachineLostError: no SSH, or the machine has ended.
    """
    login = session.environments.login(environment, role, user)
    try:
        return Connection(login, 60, lambda: session.cloud.alive(environment, role), session.check)
    except MachineLostError as error:
        if not session.cloud.alive(environment, role):
            why = " Its time limit has passed." if environment.expires_at <= now() else ""
            raise MachineLostError(
                f"The {role} machine of {environment.id} is not running any more.{why}",
                hint=f"provisioner destroy {environment.id} clears it away.",
            ) from error
        raise


def boot(session: Session, environment: Environment) -> dict[Role, Connection]:
    """Waits, for all machines at once, until they let the controller in as root.

    Raises:
        MachineLostError: with the end of the machine's console.
    """

    told = {role: threading.Event() for role in environment.machines}

    def reach(role: Role, cancelled: threading.Event) -> Connection:
        deadline = time.monotonic() + BOOT_SECONDS

        def alive() -> bool:
            return not cancelled.is_set() and session.cloud.alive(environment, role)

        try:
            session.environments.pin(environment, role, _host_key(session, environment, role, deadline, alive))
            told[role].set()
            if (jump := environment.endpoints[role].jump) and not told[jump].wait(BOOT_SECONDS):
                raise MachineLostError("The machine that leads to it did not come up.")
            login = session.environments.login(environment, role, "root")
            return Connection(login, deadline - time.monotonic(), alive, session.check)
        except MachineLostError as error:
            console = "\n".join(session.cloud.console(environment, role).splitlines()[-15:])
            raise MachineLostError(f"The {role} machine did not come up: {error.message}", details=console) from error

    connections = in_parallel(environment.machines, reach)
    try:
        session.cloud.seal(environment, connections)
    except BaseException:
        for connection in connections.values():
            connection.close()
        raise
    return connections


def _host_key(
    session: Session, environment: Environment, role: Role, deadline: float, alive: Callable[[], bool]
) -> str:
    """The machine's host key, from the cloud alone: what answers at its address must show the same."""
    while (key := session.cloud.host_key(environment, role)) is None:
        session.check()
        if time.monotonic() > deadline or not alive():
            raise MachineLostError("The cloud does not tell its host key.")
        time.sleep(POLL_SECONDS)
    return key


def in_parallel(roles: Mapping[Role, object], work: Callable[[Role, threading.Event], T]) -> dict[Role, T]:
    """Does something with all machines at once; the first failure is raised, and the event tells the others to stop."""
    cancelled = threading.Event()
    pool = ThreadPoolExecutor(max_workers=len(roles))
    try:
        futures = {role: pool.submit(work, role, cancelled) for role in roles}
        wait(futures.values(), return_when="FIRST_EXCEPTION")
        for future in futures.values():
            if future.done():
                future.result()
        return {role: future.result() for role, future in futures.items()}
    except BaseException:
        cancelled.set()
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


@contextlib.contextmanager
def held(session: Session, environment: Environment) -> Iterator[Environment]:
    """Keeps other provisioners from changing the environment while this one does.

    Yields:
        the record as it is now: another provisioner may have changed it until then. The one given, if none is kept.
    """

    def tell() -> None:
        session.progress.note(f"Another provisioner works on {environment.id}; waiting for it")

    with locked(session.environments.lock(environment.id), on_wait=tell):
        yield session.environments.reread(environment)


def destroy(session: Session, *environments: Environment) -> None:
    """Destroys machines, asks the cloud whether they are gone, removes what is not, and archives the records.

    Safe to repeat, and after a crash at any moment. Terraform's word is not taken for it: killed at the wrong
    moment it forgets a machine and then destroys nothing with exit code 0.

    Args:
        environments: of one stack; they take one run of Terraform. One that leaves others behind takes none: it stops
            costing at once, and the controller spends no provider's start on it.

    Raises:
        StillThereError: something would not go, or the cloud could not be asked; its record and its hold stay.
    """
    ran = {one.id: holds.runs(session, one) for one in environments}
    environments = tuple(_marked(session, one, "destroying") for one in environments)
    stack = stack_of(session, environments[0])
    trouble: ProvisionerError | None = None
    by_hand = len(environments) == 1 and environments[0].stack != environments[0].id and not stack.is_remote
    try:
        if by_hand:
            stack.rest(session.progress.note)
            session.cloud.remove(environments[0])
        else:
            stack.remove({one.id for one in environments}, session.progress.note)
    except (InfrastructureError, HostError) as error:
        trouble = error
    still_there = {one.id: left for one in environments if (left := _verify(session, one))}
    gone = [one for one in environments if one.id not in still_there]
    if (trouble or by_hand) and gone:
        # The cloud says that all is gone: what remains of the stack describes nothing.
        stack.forget({one.id for one in gone})
    for one in gone:
        holds.settle(session, one, ran=ran[one.id])
        session.environments.archive(one)
        session.leases.release(one.id)
    if still_there:
        raise StillThereError(
            "; ".join(f"{name} is not gone: {', '.join(left)}" for name, left in still_there.items()),
            hint=f"provisioner destroy {' '.join(still_there)} tries again.",
            details=trouble.details if trouble else None,
        )


def _marked(session: Session, environment: Environment, status: Status) -> Environment:
    """The record with another status, written if it can be: a full disk must not keep machines alive."""
    try:
        return session.environments.update(environment, status=status)
    except OSError:
        return environment


def _verify(session: Session, environment: Environment) -> list[str]:
    """Removes what is left of an environment, and says what would not go, as the cloud tells it."""
    try:
        left = session.cloud.left(environment)
        if not left and environment.placement and not environment.endpoints:
            # An apply began, and nobody knows how far it came: a cloud may take a moment to show what it has just made.
            time.sleep(SECOND_LOOK_SECONDS)
            left = session.cloud.left(environment)
        if left:
            session.progress.note(f"Still there of {environment.id}: {', '.join(left)}; removing it")
            session.cloud.remove(environment)
            left = session.cloud.left(environment)
        return left
    except StillThereError as error:
        return [error.message]
    except ProvisionerError as error:
        _marked(session, environment, "unverified")
        return [f"the cloud did not say what is left: {error.message}"]


def forget_stacks(session: Session) -> None:
    """Removes the directories of stacks that no environment belongs to: a crash came in the middle of their removal."""
    # The directories first: a record is there before its stack.
    directories = [path for path in session.home.stacks.glob("*/") if not path.name.startswith((".", NETWORK_STACK))]
    if session.environments.unreadable():
        return
    known = {one.stack for one in session.environments.readable()}
    for directory in directories:
        if directory.name not in known:
            Stack(directory).discard()


def keep_journals(session: Session, environment: Environment) -> None:
    """Fetches the end of each machine's journal into the environment's logs, of those that let the controller in."""

    def fetch(role: Role, _: threading.Event) -> None:
        argv = ["journalctl", "--boot", "--no-pager", "--lines", str(JOURNAL_LINES)]
        # OSError too: what cannot be kept must not keep the machine.
        with contextlib.suppress(InfrastructureError, TimeoutError, OSError):
            if not session.cloud.alive(environment, role):
                return
            login = session.environments.login(environment, role, "root")
            with Connection(login, JOURNAL_SECONDS) as connection:
                told = connection.run(argv, timeout_seconds=JOURNAL_SECONDS, limit_bytes=JOURNAL_BYTES).stdout
            text = session.redactor.redact(told.decode(errors="replace"))
            write_atomically(session.environments.logs(environment.id) / f"journal-{role}.log", text)

    in_parallel(environment.machines, fetch)


def keep_logs(session: Session, environment: Environment) -> None:
    """Copies what else goes with the machines into the environment's logs, if it can: consoles, and Terraform's log."""
    if not session.environments.directory(environment.id).is_dir():
        return
    directory = session.environments.logs(environment.id)
    with contextlib.suppress(OSError):  # a full disk must not keep machines alive
        texts = {f"console-{role}.log": session.cloud.console(environment, role) for role in environment.machines}
        for name, text in (texts | {"terraform.log": stack_of(session, environment).log_text()}).items():
            if text:
                write_atomically(directory / name, session.redactor.redact(text))
