"""Names the layers that images are built of, says which are reused, and builds from the highest that exists.

A layer is an image of its own: whole or absent, and made once.

base image -> build steps, a layer after each -> install(), with the files that it sees; a layer after it if the
manifest names them -> all other files.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Generic, TypeVar

from provisioner.base.clock import now
from provisioner.base.errors import CapacityError, ImageBuildError, InfrastructureError, TaskFamilyError
from provisioner.base.models import BuildStep, Environment, VMSpec
from provisioner.base.progress import describe
from provisioner.clouds.sizing import MINIMUM_DISK_GIB
from provisioner.driver.task_driver import TaskDriver
from provisioner.family.files import digest_files
from provisioner.family.loader import TaskFamily
from provisioner.images.builder import Builder, build, secrets_in
from provisioner.images.provisioning import Account, read_packages, run_steps
from provisioner.session import Session
from provisioner.ssh.connection import Connection
from provisioner.store.images import Image


def disk_gib(family: TaskFamily) -> int:
    """Returns the largest disk, in GiB, that any of the family's tasks asks for, since all boot from one image."""
    sizes = [task.resources.storage_gb or 0 for task in family.manifest.tasks.values()]
    return max(MINIMUM_DISK_GIB, math.ceil(max(sizes, default=0)))


def family_image_name(family: TaskFamily, base: str, variables: Mapping[str, str]) -> str:
    """Returns the name of a family's image: a hash of base image, disk, build steps, files and variables."""
    below = (base, *layer_names(family, base, variables))[-1]
    parts = (below, str(disk_gib(family)), family.name, digest_files(family.directory, family.files))
    return _name("family", family, _sha(*parts, text=_json(variables)).hexdigest())


def aux_image_name(family: TaskFamily, base: str, spec: VMSpec) -> str:
    """Returns the name of an aux image: a hash of base image, build steps and the files that they copy."""
    return _name("aux", family, _after_each(family, spec.build_steps, _sha(base))[-1])


def aux_layer_names(family: TaskFamily, base: str, spec: VMSpec) -> tuple[str, ...]:
    """Returns the names of the layers after each of an aux VM's build steps."""
    return tuple(_name("layer", family, key) for key in _after_each(family, spec.build_steps, _sha(base)))


def layer_names(family: TaskFamily, base: str, variables: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the names of the layers of the primary machine, whose build steps and install() get the variables.

    There is one after each build step, and one after install() if the manifest names the files that it sees.
    """
    sha = _sha(base, str(disk_gib(family)), text=_json(variables))
    keys = _after_each(family, family.build_steps, sha)
    if family.manifest.install_inputs is not None:
        sha.update(f"install {family.name} {digest_files(family.directory, family.install_files)}".encode())
        keys.append(sha.hexdigest())
    return tuple(_name("layer", family, key) for key in keys)


def require_unchanged(family: TaskFamily, name: str, again: Callable[[], str]) -> None:
    """Checks, once files were read for an image, that they are still those that it is named by.

    Args:
        name: the image's.
        again: names it again, by the files as they are now.

    Raises:
        ImageBuildError: they are not: under this name, later builds would take the wrong files for the right ones.
    """
    try:
        is_same = again() == name
    except TaskFamilyError:  # one is gone
        is_same = False
    if not is_same:
        raise ImageBuildError(f"Files of {family.title} changed while they were read.", hint="Run the command again.")


def _after_each(family: TaskFamily, steps: Sequence[BuildStep], sha: hashlib._Hash) -> list[str]:
    """Returns a hash of all steps up to each, and of what was hashed before."""
    keys = []
    for step in steps:
        sha.update(_described(family, step))
        keys.append(sha.hexdigest())
    return keys


def _described(family: TaskFamily, step: BuildStep) -> bytes:
    files = family.files_of(step)
    return (step.model_dump_json() + (digest_files(family.directory, files) if files else "")).encode()


def _sha(*parts: str, text: str = "") -> hashlib._Hash:
    return hashlib.sha256(("".join(f"{part}\0" for part in parts) + text).encode())


def _json(variables: Mapping[str, str]) -> str:
    return json.dumps(sorted(variables.items()))


def _name(kind: str, family: TaskFamily, digest: str) -> str:
    return f"{kind}-{family.name.replace('_', '-')}-{digest[:16]}"


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
        name: names the layers after each, by the files as they are now. `names` are those when the build began.
        finished: the name of the image that has all of them, and nothing else; empty if there is none such.
        install: runs the family's install() after the steps; None for aux VMs.
    """

    family: TaskFamily
    steps: tuple[BuildStep, ...]
    account: Account
    name: Callable[[], tuple[str, ...]]
    finished: str = ""
    install: Callable[[TaskDriver, Connection], None] | None = None
    names: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", self.name())

    def after(self, done: int) -> tuple[str, ...]:
        """Returns the names of the images that have the first `done` steps: the layer, or one without more steps."""
        layer = self.names[done - 1]
        return (layer, layer.replace("layer-", "aux-", 1)) if self.finished else (layer,)

    def kept(self, done: int) -> bool:
        """Returns whether a layer is kept after `done` steps."""
        last = len(self.names) - 1 if self.finished else len(self.names)
        return last - MAXIMUM_LAYERS < done <= last

    def require_unchanged(self, done: int) -> None:
        """Checks that the step which was the last to run has had the files that the layer after it is named by.

        Raises:
            ImageBuildError: its files changed.
        """
        if done <= len(self.steps) and self.family.files_of(self.steps[done - 1]):
            require_unchanged(self.family, self.names[done - 1], lambda: self.name()[done - 1])


@dataclass(frozen=True)
class Built(Generic[Result]):
    """What has come of a build.

    Args:
        result: what filled the builder returned.
        packages: those of the image.
    """

    result: Result
    packages: tuple[str, ...]


def present(session: Session, steps: Steps) -> tuple[str, ...]:
    """Returns the layers that exist, the lowest first."""
    if not session.cloud.keeps_layers:
        return ()
    return tuple(name for name in steps.names if session.images.finished(name))


def highest(session: Session, steps: Steps) -> tuple[int, str]:
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
    done, below = highest(session, steps)

    def fill_all(driver: TaskDriver, connection: Connection, environment: Environment) -> Built[Result]:
        def keep(number: int) -> None:
            steps.require_unchanged(number)
            if session.cloud.keeps_layers and steps.kept(number):
                _keep(session, builder, steps.names[number - 1], environment, connection)

        count = len(steps.steps)
        run_steps(session, steps.family, steps.steps, driver, connection, steps.account, done=done, after=keep)
        if steps.install and done <= count:
            steps.install(driver, connection)
            keep(count + 1)
        return Built(fill(driver, connection), read_packages(connection))

    return build(session, replace(builder, image=below or builder.image), name, directory, fill_all)


def _keep(session: Session, builder: Builder, name: str, environment: Environment, connection: Connection) -> None:
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
                family=builder.label,
            )  # fmt: skip
            session.images.finish(layer, directory)
        except (CapacityError, InfrastructureError, OSError) as error:
            session.progress.note(f"The layer of this step is not kept: {describe(error)}")


# In the place of what is reused, so that no reader takes the silence for an end.
NOTHING_REUSED = ": the first build takes a minute or more"


def reused(session: Session, plan: Steps) -> str:
    """Says what is reused of an image that is to be built, in words that follow on its name; empty if nothing is."""
    done, _ = highest(session, plan)
    steps = min(done, len(plan.steps))
    parts = []
    if steps:
        parts.append("build step 1 is reused" if steps == 1 else f"build steps 1 to {steps} are reused")
    if done > steps:
        parts.append("install() is reused")
    return f": {'; '.join(parts)}" if parts else ""
