"""Names the layers that images are built of, says why they are built, and builds from the highest that exists.

A layer is an image of its own: whole or absent, and made once.

base image -> build steps, a layer after each -> install(), with the files that it sees; a layer after it if the
manifest names them -> all other files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Generic, TypeVar

from provisioner.base.clock import now
from provisioner.base.errors import CapacityError, ImageBuildError, InfrastructureError, TaskFamilyError, UsageError
from provisioner.base.models import BuildStep, Environment, VMSpec
from provisioner.base.printable import beginning, printable
from provisioner.base.progress import describe
from provisioner.clouds.sizing import MINIMUM_DISK_GIB
from provisioner.driver.task_driver import TaskDriver
from provisioner.family.files import digest_files
from provisioner.family.loader import TaskFamily
from provisioner.images.builder import Builder, build, secrets_in
from provisioner.images.provisioning import Account, read_packages, run_steps
from provisioner.session import Session
from provisioner.ssh.connection import Connection
from provisioner.store.images import MAXIMUM_INPUT_FILES, Image, Inputs, Kind

# How many changed files are named; the others are counted.
SHOWN = 3
NAME_CHARACTERS = 200


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


def inputs(family: TaskFamily, base: str, variables: Mapping[str, str]) -> Inputs:
    """Describes what the family's image is built from, to tell later what has changed."""
    few = len(family.files) <= MAXIMUM_INPUT_FILES
    return Inputs(
        base=base,
        variables=_sha(text=_json(variables)).hexdigest()[:16],
        steps=_each(family, family.build_steps),
        files={name: digest_files(family.directory, [name])[:16] for name in family.files} if few else {},
    )


def aux_inputs(family: TaskFamily, base: str, spec: VMSpec) -> Inputs:
    """Describes what an aux image is built from, to tell later what has changed."""
    return Inputs(base=base, steps=_each(family, spec.build_steps))


def changes(before: Inputs, after: Inputs) -> list[str]:
    """Says in words how what images are built from differs. Pure."""
    words = []
    if before.base != after.base:
        words.append("the base image changed")
    if before.variables != after.variables:
        words.append("the env file's variables changed")
    if before.steps != after.steps:
        same = _common(before.steps, after.steps)
        words.append(f"build step {same + 1} {_how(same < len(before.steps), same < len(after.steps))}")
    names = sorted(before.files.keys() | after.files.keys())
    changed = [name for name in names if before.files.get(name) != after.files.get(name)]
    for name in changed[:SHOWN]:
        shown = beginning(printable(name), NAME_CHARACTERS)
        words.append(f"{shown} {_how(name in before.files, name in after.files)}")
    if len(changed) > SHOWN:
        words.append(f"{len(changed) - SHOWN} more files changed")
    return words


def _how(was_there: bool, is_there: bool) -> str:
    return "is new" if not was_there else "changed" if is_there else "is gone"


def _after_each(family: TaskFamily, steps: Sequence[BuildStep], sha: hashlib._Hash) -> list[str]:
    """Returns a hash of all steps up to each, and of what was hashed before."""
    keys = []
    for step in steps:
        sha.update(_described(family, step))
        keys.append(sha.hexdigest())
    return keys


def _each(family: TaskFamily, steps: Sequence[BuildStep]) -> tuple[str, ...]:
    return tuple(hashlib.sha256(_described(family, step)).hexdigest()[:16] for step in steps)


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
        install: runs the family's install() after the steps, and returns how many seconds it took; None for aux VMs.
    """

    family: TaskFamily
    steps: tuple[BuildStep, ...]
    account: Account
    name: Callable[[], tuple[str, ...]]
    finished: str = ""
    install: Callable[[TaskDriver, Connection], float] | None = None
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


# In the place of reasons, so that no reader takes the silence for an end.
FIRST_BUILD = ": the first build takes a minute or more"
# What took less is not worth a word.
SHOWN_SECONDS = 1.0


def why(session: Session, plan: Steps, inputs: Inputs) -> str:
    """Says why an image is built from `inputs`, in words that follow on its name; empty if it is the first."""
    steps = len(inputs.steps)
    done, _ = highest(session, plan)
    if plan.family.hostname:  # our own families are called alike, and are nothing to each other
        return f": {done} of {steps} steps are reused" if done else ""
    image, before = _nearest(session, "aux" if plan.finished else "family", plan.family, inputs)
    reasons = changes(before, inputs) if before else []
    if reused := min(done, steps):
        reasons.append("build step 1 is reused" if reused == 1 else f"build steps 1 to {reused} are reused")
    if done > steps:
        reasons.append("install() is reused")
    elif image:
        reasons += _took(image, done, steps)
    return f": {'; '.join(reasons)}" if reasons else ""


def _took(image: Image, done: int, steps: int) -> list[str]:
    """Says how long what runs again took when an earlier image was built, as far as that is known."""
    again = image.step_seconds[done:steps]
    what = f"build steps {done + 1} to {done + len(again)}" if len(again) > 1 else f"build step {done + 1}"
    took = [(what, sum(again) if all(again) else 0.0), ("install()", image.install_seconds)]
    return [f"{what} took {seconds:.0f} s last time" for what, seconds in took if seconds >= SHOWN_SECONDS]


def _nearest(
    session: Session, kind: Kind, family: TaskFamily, inputs: Inputs
) -> tuple[Image, Inputs] | tuple[None, None]:
    """Returns the image that has most in common with a new one, and of those the newest, and what it was built from."""
    here = (family.name, session.cloud.name)
    images = session.images.all(f"{kind}-{family.name.replace('_', '-')}-")
    images = [image for image in images if (image.family, image.cloud) == here]
    known = [(image, each) for image in images if (each := session.images.inputs(image.name))]
    if kind == "aux":  # a family may have several, which are nothing to each other
        known = [(image, each) for image, each in known if not each.steps or each.steps[0] == inputs.steps[0]]
    return max(reversed(known), key=lambda pair: _common(pair[1].steps, inputs.steps), default=(None, None))


def _common(some: Sequence[str], others: Sequence[str]) -> int:
    pairs = list(zip(some, others, strict=False))
    return next((at for at, (one, other) in enumerate(pairs) if one != other), len(pairs))
