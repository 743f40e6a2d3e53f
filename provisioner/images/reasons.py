"""Says why images are built: what has changed since the last one, what is reused, and how long the rest took then."""

from __future__ import annotations

from collections.abc import Sequence

from provisioner.family.loader import TaskFamily
from provisioner.images.layer_keys import changes
from provisioner.session import Session
from provisioner.store.images import Image, Inputs, Kind

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
