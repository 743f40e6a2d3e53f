"""Runs a builder: the machine with internet in which an image is built. It is destroyed afterwards."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

from provisioner.base.clock import now
from provisioner.base.errors import ImageBuildError, MachineLostError, TaskError, TaskFamilyError
from provisioner.base.models import BaseImage, Environment, MachineRecord, TaskSetup
from provisioner.base.printable import last_lines
from provisioner.clouds.guest_files import SENT
from provisioner.driver.task_driver import TaskDriver
from provisioner.images.provisioning import SECRET_SCAN_MIN_LENGTH, WITHOUT_SECRETS
from provisioner.machines.boot import boot_machines
from provisioner.machines.connect import connect
from provisioner.machines.launch import launched, looked_after
from provisioner.session import Session
from provisioner.ssh.connection import Connection
from provisioner.store.environments import new_id

DEBUGGING = "docs/authoring/debug-install.md says how to find the cause."
# EC2 takes minutes at times to stop a machine that has powered off.
POWER_OFF_SECONDS = 600
# Enough to boot, read the image and end: the reservation should be no larger than that.
INSPECTION_TTL = timedelta(minutes=20)
# The most output of secret_scan.py that is read; a line names a file with a secret. The error shows the first ten.
SECRET_SCAN_BYTES = 64 << 10

Result = TypeVar("Result")


@dataclass(frozen=True)
class Builder:
    """A machine in which an image is built.

    Args:
        label: a name for the image's owner; for a family, the family's name.
        base: the kind of image that it boots from.
        image: the name of that image.
        disk_gib: its root volume in GiB.
    """

    label: str
    base: BaseImage
    image: str
    disk_gib: int


@looked_after
def build(
    session: Session,
    builder: Builder,
    name: str,
    directory: Path,
    fill: Callable[[TaskDriver, Connection, Environment], Result],
) -> Result:
    """Boots a builder, fills it, powers it off and captures its disk as the image `name`. Destroys it in the end.

    If the session says so, a builder in which something of the family's failed is left to the operator instead.
    """
    with _booted(session, builder, session.builder_ttl) as environment:
        with connect(session, environment, "primary") as connection:
            starts_by_cloud_init = _has_cloud_init(connection)
            result = fill(_driver(session, builder, environment, connection), connection, environment)
            if starts_by_cloud_init and not _has_cloud_init(connection):  # it goes together with Debian's Python
                raise ImageBuildError(
                    "The build removed cloud-init, without which machines on AWS do not start.",
                    hint="Leave Debian's python3 there; the one in /usr/local is the family's to change.",
                )
            if found := secrets_in(session, connection):  # every later environment and agent could read them
                raise ImageBuildError("The build left secrets in the image: " + "; ".join(found), hint=WITHOUT_SECRETS)
            session.cloud.keep_when_off(environment)
            _seal_and_power_off(session, environment, connection)
        _wait_until_off(session, environment)
        session.cloud.capture(environment, name, directory)
    return result


@looked_after
def look_into(session: Session, builder: Builder, read: Callable[[TaskDriver, Connection], Result]) -> Result:
    """Boots a machine from a finished image, reads from it, and destroys it."""
    ttl = min(INSPECTION_TTL, session.builder_ttl)
    with (
        _booted(session, builder, ttl) as environment,
        connect(session, environment, "primary") as connection,
    ):
        return read(_driver(session, builder, environment, connection), connection)


def _driver(session: Session, builder: Builder, environment: Environment, connection: Connection) -> TaskDriver:
    logs = session.environments.logs(environment.id)
    return TaskDriver(connection, builder.label, session.redactor, session.output, logs)


@contextlib.contextmanager
def _booted(session: Session, builder: Builder, ttl: timedelta) -> Iterator[Environment]:
    """Yields a builder that is up, and destroys it afterwards."""
    identity = new_id(f"build-{builder.label}", None)
    size = session.cloud.builder_size(builder.base, builder.disk_gib)
    record = MachineRecord(image=builder.image, distribution=builder.base.distribution, size=size, user="root")
    created_at = now()
    environment = Environment(
        id=identity,
        kind="builder",
        cloud=session.cloud.name,
        stack=identity,
        family=builder.label,
        task=None,
        status="creating",
        shared_ledger=bool(session.database),
        attended=True,
        batch=session.spending.batch,
        created_at=created_at,
        expires_at=created_at + ttl,
        setup=TaskSetup(),
        full_internet=True,
        machines={"primary": record},
    )
    is_up = False

    def may_keep(session: Session, _: Environment, error: BaseException) -> bool:
        return session.keep_builder and is_up and isinstance(error, (ImageBuildError, TaskFamilyError, TaskError))

    with launched(session, environment, may_keep, phase=contextlib.nullcontext(), temporary=True) as environment:
        for connection in boot_machines(session, environment).values():
            connection.close()
        is_up = True
        try:
            yield environment
        except ImageBuildError as error:
            output = f"provisioner logs {environment.id} shows its full output. {DEBUGGING}"
            error.hint = f"{error.hint} {output}" if error.hint else output
            raise


def _has_cloud_init(connection: Connection) -> bool:
    return connection.run(["sh", "-c", "command -v cloud-init"]).exit_code == 0


def secrets_in(session: Session, connection: Connection) -> list[str]:
    """Searches every file that was written since a builder started for the env file's values.

    Returns:
        which files hold which, redacted.
    """
    secrets = {name: value for name, value in session.variables.items() if len(value) >= SECRET_SCAN_MIN_LENGTH}
    if not secrets:
        return []
    search = connection.run(
        ["secret_scan.py"],
        program=(SENT / "secret_scan.py").read_text(),
        stdin=json.dumps(secrets).encode(),
        timeout_seconds=session.builder_ttl.total_seconds(),
        limit_bytes=SECRET_SCAN_BYTES,
    )
    if search.exit_code != 0:
        raise MachineLostError(
            "The builder could not be searched for secrets.",
            details=last_lines(search.stderr.decode(errors="replace"), 500),
        )
    lines = search.stdout.decode(errors="replace").splitlines()
    return [session.redactor.redact(line) for line in lines[:10]]


def _seal_and_power_off(session: Session, builder: Environment, connection: Connection) -> None:
    """Removes what belongs to the builder and not to the image, and powers it off.

    Raises:
        ImageBuildError: something would have stayed.
    """
    # Neither logs nor random numbers are saved any more when the builder is switched off.
    script = """
    (journalctl --relinquish-var; systemctl stop systemd-random-seed.service; apt-get clean) > /dev/null 2>&1
    exec sh -c "$1" seal / "$2"
    """
    program = (SENT / "seal.sh").read_text()
    key = session.environments.key(builder.id, "controller").public
    sealed = connection.run(["sh", "-c", script, "sh", program, key])
    if sealed.exit_code != 0:
        raise ImageBuildError(
            "The builder's own keys and logs could not be removed from the image.",
            details=last_lines(sealed.stderr.decode(errors="replace"), 500),
        )
    # Most of what was removed leaves the local cloud's disk; not what the file system holds ready for files that grow.
    # It only makes images smaller: a trim that fails or is slow is left out, and no finished image is lost for it.
    connection.run(["sh", "-c", "sync; timeout 60 fstrim / > /dev/null 2>&1; systemctl --no-block poweroff"])


def _wait_until_off(session: Session, builder: Environment) -> None:
    deadline = time.monotonic() + POWER_OFF_SECONDS
    while session.cloud.alive(builder, "primary"):
        if time.monotonic() > deadline:
            raise MachineLostError(
                "The builder did not power off.", details=last_lines(session.cloud.console(builder, "primary"), 1500)
            )
        time.sleep(0.2)
