"""Builds family and aux images once, in a builder with internet, and names them by a hash of their contents.

The family's code runs in the builder, never on the controller. Every environment of the family boots from the disk as
it was when the builder was powered off.
"""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import replace
from pathlib import Path, PurePosixPath

from provisioner.base.clock import now
from provisioner.base.errors import UnavailableError
from provisioner.base.models import BaseImage, MachineSize, SetupData, VMSpec
from provisioner.clouds.sizing import MINIMUM_DISK_GIB
from provisioner.driver.task_driver import TaskDriver
from provisioner.family.build_steps import check_build_steps
from provisioner.family.loader import TaskFamily
from provisioner.images.builder import Builder, build, look_into
from provisioner.images.layers import (
    NOTHING_REUSED,
    Built,
    Steps,
    aux_image_name,
    aux_layer_names,
    build_over,
    disk_gib,
    family_image_name,
    layer_names,
    present,
    require_unchanged,
    reused,
)
from provisioner.images.provisioning import (
    ROOT,
    Account,
    install,
    preparation_digest,
    prepare_base,
    read_setup,
    send_other_files,
)
from provisioner.machines.create import aux_user
from provisioner.session import Session
from provisioner.ssh.connection import Connection
from provisioner.store.files import write_atomically
from provisioner.store.images import Image


def base_image(session: Session, base: BaseImage) -> str:
    """Returns the name of a base image and builds the image if it does not exist.

    Raises:
        ImageBuildError: the image could not be built.
    """
    name = session.cloud.base_image(base, session.progress)
    if session.images.load(name).kind == "base":
        return name
    vendor, sha = name, hashlib.sha256(f"{name} {preparation_digest(session, base)}".encode())
    name = f"{base.label}-{sha.hexdigest()[:16]}"
    with session.images.building(name, session.progress, session.cloud.has_image) as directory:
        if directory is not None:
            packages: tuple[str, ...] = ()
            if not session.cloud.find_image(name, directory):
                session.progress.note(
                    f"Building the base image for the {base.role} machine (only once; takes some minutes)"
                )
                builder = Builder(label=base.label, base=base, image=vendor, disk_gib=MINIMUM_DISK_GIB)
                packages = build(
                    session, builder, name, directory, lambda _, link, __: prepare_base(session, base, link)
                )
            image = Image(
                name=name, kind="base", created_at=now(), cloud=session.cloud.name, base=vendor, packages=packages
            )
            session.images.finish(image, directory)
    return name


def primary_base(session: Session, family: TaskFamily) -> BaseImage:
    """Returns the kind of base image of a family's machine: what its manifest says, or else the settings."""
    return BaseImage(role="primary", distribution=family.manifest.base_image or session.base_image)


def family_image(session: Session, family: TaskFamily) -> tuple[str, SetupData]:
    """Returns the name of the family's image and its setup data; builds the image if it does not exist.

    Raises:
        ImageBuildError: a build step or install() failed.
        TaskFamilyError: the family's setup data is not valid.
    """
    kind = primary_base(session, family)
    base = base_image(session, kind)
    name = family_image_name(family, base, session.variables)
    with session.images.building(name, session.progress, session.cloud.has_image) as directory:
        if directory is not None:
            builder = Builder(label=family.name, base=kind, image=base, disk_gib=disk_gib(family))
            setup, image = _build_family(session, family, name, builder, directory)
            write_atomically(directory / "setup-data.json", setup.model_dump_json(indent=2))
            needs = tuple(sorted(_aux_image_names(session, family, setup)))
            session.images.finish(image.model_copy(update={"needs": needs}), directory)
    return name, session.images.setup_data(name)


def _build_family(
    session: Session, family: TaskFamily, name: str, builder: Builder, directory: Path
) -> tuple[SetupData, Image]:
    image = Image(
        name=name, kind="family", created_at=now(), cloud=session.cloud.name, base=builder.image, family=family.name
    )
    if session.cloud.find_image(name, directory):
        session.progress.note(f"Reading the setup data of {family.title} from its image ({name})")
        adopted = replace(builder, image=name)
        return look_into(session, adopted, lambda driver, _: read_setup(session, driver)), image

    def unchanged() -> None:
        require_unchanged(family, name, lambda: family_image_name(family, builder.image, session.variables))

    def run_install(driver: TaskDriver, connection: Connection) -> None:
        install(session, family, driver, connection, unchanged)

    def fill(driver: TaskDriver, connection: Connection) -> SetupData:
        send_other_files(family, connection, unchanged)
        return read_setup(session, driver)

    steps = replace(_primary_steps(session, family, builder.image), install=run_install)
    session.progress.note(f"Building the image of {family.title} ({name}){reused(session, steps) or NOTHING_REUSED}")
    built = build_over(session, builder, steps, name, directory, fill)
    return built.result, image.model_copy(update={"packages": built.packages, "layers": present(session, steps)})


def _primary_steps(session: Session, family: TaskFamily, base: str) -> Steps:
    """Returns the build steps of a family's machine, without install()."""
    return Steps(family, family.build_steps, ROOT, lambda: layer_names(family, base, session.variables))


def built_family_image(session: Session, family: TaskFamily) -> str | None:
    """Returns the name of the family's image on the newest base image of its kind, or None if it is not built yet."""
    base = _newest_base(session, family)
    name = family_image_name(family, base, session.variables) if base else ""
    return name if base and session.images.finished(name) else None


def _newest_base(session: Session, family: TaskFamily) -> str:
    label = primary_base(session, family).label
    here = [image.name for image in session.images.all(label) if image.cloud == session.cloud.name]
    return next((name for name in reversed(here) if name.rpartition("-")[0] == label), "")


def outlook(session: Session, family: TaskFamily) -> str:
    """Says what is to be done for a family's image that is not built yet, as far as that can be told."""
    base = _newest_base(session, family)
    if not base:
        return "to be built first"
    return f"to be built first{reused(session, _primary_steps(session, family, base))}"


def fitting_image(size: MachineSize, family: TaskFamily) -> MachineSize:
    """Returns a primary machine's size with a disk at least as large as the image's."""
    return size.model_copy(update={"disk_gib": max(size.disk_gib, disk_gib(family))})


def _aux_image_names(session: Session, family: TaskFamily, setup: SetupData) -> set[str]:
    names = set()
    for task, data in setup.tasks.items():
        if (spec := data.aux_vm_spec) and spec.build_steps:
            check_build_steps(spec.build_steps, family.directory)
            # A task needs no image on a cloud that cannot provide its machines.
            with contextlib.suppress(UnavailableError):
                size = session.cloud.choose(family.manifest.resources(task), spec)["aux"]
                names.add(aux_image_name(family, base_image(session, _aux_base(spec, size)), spec))
    return names


def _aux_base(spec: VMSpec, size: MachineSize) -> BaseImage:
    return BaseImage(role="aux", distribution=spec.base_image_type, architecture=size.architecture)


def aux_image(session: Session, family: TaskFamily, spec: VMSpec, size: MachineSize) -> str:
    """Returns the name of the aux VM's image and builds it if it does not exist. Without build steps: the base image.

    Args:
        size: the aux VM's size, as the cloud chose it.

    Raises:
        ImageBuildError: a build step failed.
        TaskFamilyError: a build step names a file that is not in the family.
    """
    kind = _aux_base(spec, size)
    base = base_image(session, kind)
    if not spec.build_steps:
        return base
    check_build_steps(spec.build_steps, family.directory)
    name = aux_image_name(family, base, spec)
    with session.images.building(name, session.progress, session.cloud.has_image) as directory:
        if directory is not None:
            built = Built(None, ())
            user = aux_user(kind.distribution)  # who runs them, as the Task Standard has it
            account = Account(interpreter=("/bin/sh", "-e"), home=PurePosixPath("/home") / user, user=user)
            steps = Steps(family, spec.build_steps, account, lambda: aux_layer_names(family, base, spec), finished=name)
            if not session.cloud.find_image(name, directory):
                how = reused(session, steps) or NOTHING_REUSED
                session.progress.note(f"Building the aux VM's image of {family.title} ({name}){how}")
                builder = Builder(label=family.name, base=kind, image=base, disk_gib=size.disk_gib)
                built = build_over(session, builder, steps, name, directory, lambda *_: None)
            image = Image(
                name=name, kind="aux", created_at=now(), cloud=session.cloud.name, base=base, family=family.name,
                packages=built.packages, layers=present(session, steps),
            )  # fmt: skip
            session.images.finish(image, directory)
    return name


def build_all(session: Session, family: TaskFamily) -> tuple[str, list[str]]:
    """Builds the family's image and the aux images of all its tasks.

    Returns:
        the family image's name and the aux images' names.
    """
    name, setup = family_image(session, family)
    aux_names = set()
    for task, data in setup.tasks.items():
        if spec := data.aux_vm_spec:
            size = session.cloud.choose(family.manifest.resources(task), spec)["aux"]
            aux_names.add(aux_image(session, family, spec, size))
    return name, sorted(aux_names)
