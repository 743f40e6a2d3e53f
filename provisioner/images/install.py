"""Builds the images of families that say what install() sees: install() runs again only if that has changed.

Such a family has two images. In one, install() has run. The other has no disk: it adds the remaining files, which
machines get before start(), and the setup data. Where that is known already, no machine boots for it.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from provisioner.clock import now
from provisioner.driver.task_driver import TaskDriver
from provisioner.errors import InfrastructureError, UsageError
from provisioner.family.loader import TaskFamily
from provisioner.images.builder import Builder, look_into
from provisioner.images.family_files import pack, unpack
from provisioner.images.layer_keys import (
    added_files,
    family_image_name,
    inputs,
    install_image_name,
    install_inputs,
    require_unchanged,
    setup_key,
)
from provisioner.images.layers import Steps, build_over, done_before, present
from provisioner.images.provisioning import install, read_setup
from provisioner.images.reasons import FIRST_BUILD, images_of, why
from provisioner.models import SetupData
from provisioner.session import Session
from provisioner.ssh.connection import Connection
from provisioner.store.files import write_atomically
from provisioner.store.images import ADDED_FILES, INPUTS, Image


def is_split(session: Session, family: TaskFamily) -> bool:
    """Returns whether a family has two images in this session's cloud."""
    return session.cloud.keeps_layers and family.manifest.install_inputs is not None


def install_image(session: Session, family: TaskFamily, builder: Builder, steps: Steps) -> str:
    """Returns the name of the image in which install() has run; builds it if it does not exist.

    Raises:
        ImageBuildError: a build step or install() failed.
    """
    name = install_image_name(family, builder.image, session.variables)
    with session.images.building(name, session.progress, session.cloud.has_image) as directory:
        if directory is not None:
            made_of = install_inputs(family, builder.image, session.variables)
            reasons = why(session, "install", family, made_of, done_before(session, steps))
            session.progress.note(
                f"Building the image of {family.title} for install() ({name}){reasons or FIRST_BUILD}"
            )

            def unchanged() -> None:
                require_unchanged(family, name, lambda: install_image_name(family, builder.image, session.variables))

            def fill(driver: TaskDriver, connection: Connection) -> float:
                return install(session, family, driver, connection, unchanged)

            built = build_over(session, builder, steps, name, directory, fill)
            write_atomically(directory / INPUTS, made_of.model_dump_json())
            image = Image(
                name=name, kind="install", created_at=now(), cloud=session.cloud.name, base=builder.image,
                family=family.name, packages=built.packages, layers=present(session, steps),
                step_seconds=built.step_seconds, install_seconds=built.result,
            )  # fmt: skip
            session.images.finish(image, directory)
    return name


def add_files(
    session: Session, family: TaskFamily, name: str, builder: Builder, directory: Path
) -> tuple[SetupData, str]:
    """Packs the files that install() has not seen into the image that adds them.

    Args:
        name: that image's.
        builder: which begins with the image in which install() has run.
        directory: the one in which the image is being built.

    Returns:
        the family's setup data, and a hash of what it may depend on.

    Raises:
        ImageBuildError: a file holds a secret, or files changed meanwhile.
        TaskFamilyError: the setup data is not valid.
    """
    archive = directory / ADDED_FILES
    key = setup_key(family, builder.image)
    known = _known_setup(session, family, key)
    before = session.images.load(builder.image).base or ""
    reasons = why(session, "family", family, inputs(family, before, session.variables))
    pack(family, added_files(family), archive, session.variables)
    require_unchanged(family, name, lambda: family_image_name(family, before, session.variables))
    if known:
        session.progress.note(f"No image of {family.title} is built{reasons}")
        return known, key
    session.progress.note(f"Reading the setup data of {family.title}{reasons}")

    def read(driver: TaskDriver, connection: Connection) -> SetupData:
        unpack(connection, archive)
        return read_setup(session, driver)

    return look_into(session, builder, read), key


def _known_setup(session: Session, family: TaskFamily, key: str) -> SetupData | None:
    """Returns the setup data of an image with the same key, if there is one that can be read."""
    for image in images_of(session, "family", family):
        if image.setup_key == key:
            with contextlib.suppress(UsageError, InfrastructureError):  # removed meanwhile, or of another version
                return session.images.setup_data(image.name)
    return None
