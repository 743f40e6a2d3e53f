"""Runs build steps in a builder that begins where an earlier one has been, and keeps what it has come to as layers.

A layer is an image of its own: whole or absent, and made once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

from provisioner.best_effort import describe
from provisioner.clock import now
from provisioner.driver.task_driver import TaskDriver
from provisioner.errors import CapacityError, InfrastructureError, UsageError
from provisioner.family.loader import TaskFamily
from provisioner.images.builder import Builder, build, secrets_in
from provisioner.images.layer_keys import files_of, require_unchanged
from provisioner.images.provisioning import Account, read_packages, run_steps
from provisioner.models import BuildStep, Environment
from provisioner.session import Session
from provisioner.ssh.connection import Connection
from provisioner.store.images import Image

# Of more steps, only those at the end have layers: each is a copy of all that lies between it and the base image.
MAXIMUM_LAYERS = 16
SYNC_SECONDS = 600.0

Result = TypeVar("Result")


@dataclass(frozen=True)
class Steps:
    """The build steps of one image.

    Args:
        family: where their files are.
        steps: in their order.
        account: the user that runs them.
        name: names the layers after each, by the files as they are now.
        names: those names when the build began.
        finished: the name of the image that has all of them, and nothing else; empty if there is none such.
        install: runs the family's install() after the steps, and returns how many seconds it took; None for aux VMs.
    """

    family: TaskFamily
    steps: tuple[BuildStep, ...]
    account: Account
    name: Callable[[], tuple[str, ...]]
    names: tuple[str, ...]
    finished: str = ""
    install: Callable[[TaskDriver, Connection], float] | None = None

    def after(self, done: int) -> tuple[str, ...]:
        """Returns the names of the images that have so many of the steps: the layer, and one of no more steps."""
        layer = self.names[done - 1]
        return (layer, layer.replace("layer-", "aux-", 1)) if self.finished else (layer,)

    def kept(self, done: int) -> bool:
        """Returns whether there is to be a layer after so many steps."""
        last = len(self.names) - 1 if self.finished else len(self.names)
        return last - MAXIMUM_LAYERS < done <= last

    def require_unchanged(self, done: int) -> None:
        """Checks that the step which was the last to run has had the files that the layer after it is named by.

        Raises:
            ImageBuildError: its files changed.
        """
        if done <= len(self.steps) and files_of(self.family, self.steps[done - 1]):
            require_unchanged(self.family, self.names[done - 1], lambda: self.name()[done - 1])


@dataclass(frozen=True)
class Built(Generic[Result]):
    """What has come of a build.

    Args:
        result: what filled the builder returned.
        packages: those of the image.
        step_seconds: how long each of the build steps took when it ran; 0 if that is not known.
        install_seconds: the same of install().
    """

    result: Result
    packages: tuple[str, ...]
    step_seconds: tuple[float, ...]
    install_seconds: float = 0.0


def present(session: Session, steps: Steps) -> tuple[str, ...]:
    """Returns the layers that exist, the lowest first."""
    if not session.cloud.keeps_layers:
        return ()
    return tuple(name for name in steps.names if session.images.finished(name))


def done_before(session: Session, steps: Steps) -> int:
    """Returns how many of the steps need not run, since an image has them."""
    return _highest(session, steps)[0]


def _highest(session: Session, steps: Steps) -> tuple[int, str]:
    """Returns how many of the steps an image has, and its name; 0 and no name if there is none."""
    if session.cloud.keeps_layers:
        for done in range(len(steps.names), 0, -1):
            for name in steps.after(done):
                if session.images.finished(name):
                    return done, name
    return 0, ""


def build_over(
    session: Session,
    builder: Builder,
    steps: Steps,
    name: str,
    directory: Path,
    fill: Callable[[TaskDriver, Connection], Result],
) -> Built[Result]:
    """Builds the image `name` from the highest layer that exists.

    Args:
        builder: which begins with the base image if there is no layer.
        fill: called when all steps and install() have run.

    Raises:
        ImageBuildError: a step failed, or the files that it copied changed meanwhile.
    """
    done, below = _highest(session, steps)
    took = _seconds_of(session, below, done)

    def fill_all(driver: TaskDriver, connection: Connection, environment: Environment) -> Built[Result]:
        def keep(number: int, seconds: float) -> None:
            steps.require_unchanged(number)
            took.append(seconds)
            if session.cloud.keeps_layers and steps.kept(number):
                _keep(session, builder, steps.names[number - 1], environment, connection, tuple(took))

        count = len(steps.steps)
        run_steps(session, steps.family, steps.steps, driver, connection, steps.account, done=done, after=keep)
        if steps.install and done <= count:
            keep(count + 1, steps.install(driver, connection))
        return Built(fill(driver, connection), read_packages(connection), tuple(took[:count]), sum(took[count:]))

    return build(session, replace(builder, image=below or builder.image), name, directory, fill_all)


def _seconds_of(session: Session, image: str, done: int) -> list[float]:
    """Returns how long each of the steps took that an image has."""
    known: tuple[float, ...] = ()
    with contextlib.suppress(UsageError, InfrastructureError):  # no image, or of another version
        known = session.images.load(image).step_seconds if image else ()
    return [*known, *[0.0] * done][:done]


def _keep(
    session: Session,
    builder: Builder,
    name: str,
    environment: Environment,
    connection: Connection,
    step_seconds: tuple[float, ...],
) -> None:
    """Keeps the disk of a builder as a layer, unless there is no room or a secret is on it.

    Later builds search only what they wrote themselves for secrets.
    """
    if secrets_in(session, connection):
        return
    with session.images.building(name, session.progress) as directory:
        if directory is None:
            return
        connection.run(["sh", "-c", "sync"], timeout_seconds=SYNC_SECONDS)
        try:
            session.cloud.keep_layer(environment, directory)
            layer = Image(
                name=name, kind="layer", created_at=now(), cloud=session.cloud.name, base=builder.image,
                family=builder.label, step_seconds=step_seconds,
            )  # fmt: skip
            session.images.finish(layer, directory)
        except (CapacityError, InfrastructureError, OSError) as error:
            session.progress.note(f"The layer of this step is not kept: {describe(error)}")
