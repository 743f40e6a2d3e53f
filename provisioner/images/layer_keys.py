"""Names the layers that images are built of, and says why they are built: what has changed since the last.

Only reads the family's files.

base image -> build steps, a layer after each -> install(), with the files that it sees; a layer after it if the
manifest names them -> all other files.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence

from provisioner.clouds.sizing import MINIMUM_DISK_GIB
from provisioner.errors import ImageBuildError, TaskFamilyError
from provisioner.family.files import digest_files, list_files, matching
from provisioner.family.loader import TaskFamily
from provisioner.models import BuildStep, ShellBuildStep, VMSpec
from provisioner.printable import beginning, printable
from provisioner.session import Session
from provisioner.store.images import MAXIMUM_INPUT_FILES, Image, Inputs, Kind

# As many are named; the others are counted.
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
        sha.update(f"install {family.name} {digest_files(family.directory, install_files(family))}".encode())
        keys.append(sha.hexdigest())
    return tuple(_name("layer", family, key) for key in keys)


def install_files(family: TaskFamily) -> tuple[str, ...]:
    """Returns the files that install() sees: those that the manifest names and the module, or all."""
    if family.manifest.install_inputs is None:
        return family.files
    named = {*matching(family.manifest.install_inputs, family.files), family.module.name}
    return tuple(name for name in family.files if name in named)


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
    words += _changed_steps(before.steps, after.steps)
    names = sorted(before.files.keys() | after.files.keys())
    changed = [name for name in names if before.files.get(name) != after.files.get(name)]
    words += [
        f"{beginning(printable(name), NAME_CHARACTERS)} {_how(name, before.files, after.files)}"
        for name in changed[:SHOWN]
    ]
    if len(changed) > SHOWN:
        words.append(f"{len(changed) - SHOWN} more files changed")
    return words


def _how(name: str, before: Mapping[str, str], after: Mapping[str, str]) -> str:
    if name not in before:
        return "is new"
    return "changed" if name in after else "is gone"


def _changed_steps(before: Sequence[str], after: Sequence[str]) -> list[str]:
    same = 0
    while same < min(len(before), len(after)) and before[same] == after[same]:
        same += 1
    if same == len(before) == len(after):
        return []
    if same == len(before):
        return [f"build step {same + 1} is new"]
    return [f"build step {same + 1} {'changed' if same < len(after) else 'is gone'}"]


def files_of(family: TaskFamily, step: BuildStep) -> tuple[str, ...]:
    """Returns the files that a build step copies, or that its commands read, relative to the family's directory.

    A source that is a link stands for the file to which it leads: that is what the step copies.
    """
    if isinstance(step, ShellBuildStep):
        return tuple(name for name in family.files if name.partition("/")[0] in step.reads)
    path = family.directory / step.source
    if path.is_dir():
        return list_files(family.directory, path)
    return (os.path.relpath(path.resolve(), family.directory),)


def _after_each(family: TaskFamily, steps: Sequence[BuildStep], sha: hashlib._Hash) -> list[str]:
    """Returns a hash of all steps up to each, and of what was hashed before."""
    keys = []
    for step in steps:
        sha.update(_bytes_of(family, step))
        keys.append(sha.hexdigest())
    return keys


def _each(family: TaskFamily, steps: Sequence[BuildStep]) -> tuple[str, ...]:
    return tuple(hashlib.sha256(_bytes_of(family, step)).hexdigest()[:16] for step in steps)


def _bytes_of(family: TaskFamily, step: BuildStep) -> bytes:
    files = files_of(family, step)
    return (step.model_dump_json() + (digest_files(family.directory, files) if files else "")).encode()


def _sha(*parts: str, text: str = "") -> hashlib._Hash:
    return hashlib.sha256(("".join(f"{part}\0" for part in parts) + text).encode())


def _json(variables: Mapping[str, str]) -> str:
    return json.dumps(sorted(variables.items()))


def _name(kind: str, family: TaskFamily, digest: str) -> str:
    return f"{kind}-{family.name.replace('_', '-')}-{digest[:16]}"


# In the place of reasons, so that no reader takes the silence for an end.
FIRST_BUILD = ": the first build takes a minute or more"
# What took less is not worth a word.
SHOWN_SECONDS = 1.0


def why(session: Session, kind: Kind, family: TaskFamily, inputs: Inputs, done: int = 0) -> str:
    """Says why an image is built, in words that follow on its name; empty if it is the first.

    Args:
        kind: the image's.
        inputs: what it is built from.
        done: how many build steps need not run again, and one more if install() need not either.
    """
    steps = len(inputs.steps)
    if family.hostname:  # our own families are called alike, and are nothing to each other
        return f": {done} of {steps} steps are reused" if done else ""
    image, before = _nearest(session, kind, family, inputs)
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
    return next((at for at, (one, other) in enumerate(zip(some, others, strict=False)) if one != other), len(some))
