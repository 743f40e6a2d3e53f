"""Builds family and aux images once, in a builder with internet, and names them by a hash of their contents.

The family's code runs in the builder, never on the controller. Every environment of the family boots from the disk as
it was when the builder was powered off.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePosixPath

from provisioner.clock import now
from provisioner.clouds.sizing import MINIMUM_DISK_GIB
from provisioner.errors import UnavailableError
from provisioner.family.files import digest_files
from provisioner.family.loader import TaskFamily, check_build_steps, family_digest
from provisioner.images.builder import Builder, build, look_into
from provisioner.images.provisioning import (
    Account,
    files_of,
    fill_family,
    preparation_digest,
    prepare_base,
    read_packages,
    read_setup,
    run_steps,
)
from provisioner.machines.create import AUX_USER
from provisioner.models import BaseImage, FileBuildStep, MachineSize, SetupData, VMSpec
from provisioner.remote.driver import TaskDriver
from provisioner.remote.ssh import Connection
from provisioner.session import Session
from provisioner.store.files import write_atomically
from provisioner.store.images import Image

AUX_ACCOUNT = Account(interpreter=("/bin/sh", "-e"), home=PurePosixPath("/home") / AUX_USER, user=AUX_USER)


def family_image_name(family: TaskFamily, base: str, variables: Mapping[str, str]) -> str:
    """Returns the name of a family's image: a hash of base image, files, build steps and variables."""
    sha = hashlib.sha256(f"{base}\0{family_digest(family)}\0".encode())
    sha.update(json.dumps(sorted(variables.items())).encode())
    return f"family-{family.name.replace('_', '-')}-{sha.hexdigest()[:16]}"


def aux_image_name(family: TaskFamily, base: str, spec: VMSpec) -> str:
    """Returns the name of an aux image: a hash of base image, build steps and the files that they copy."""
    sha = hashlib.sha256(f"{base}\0".encode())
    for step in spec.build_steps:
        sha.update(step.model_dump_json().encode())
        if isinstance(step, FileBuildStep):
            sha.update(_content_digest(family, step.source))
    return f"aux-{family.name.replace('_', '-')}-{sha.hexdigest()[:16]}"


def _content_digest(family: TaskFamily, source: str) -> bytes:
    return digest_files(family.directory, files_of(family, source)).encode()


def base_image(session: Session, base: BaseImage) -> str:
    """Returns the name of a base image and builds the image if it does not exist.

    Raises:
        ImageBuildError: the image could not be built.
    """
    name = session.cloud.base_image(base, session.progress)
    if session.images.load(name).kind == "base":
        return name
    vendor = name
    sha = hashlib.sha256(f"{vendor} {preparation_digest(session, base)}".encode())
    name = f"base-{base.role}-{sha.hexdigest()[:16]}"
    with session.images.building(name, session.progress, session.cloud.has_image) as directory:
        if directory is not None:
            packages: tuple[str, ...] = ()
            if not session.cloud.adopt(name, directory):
                session.progress.note(
                    f"Building the base image for the {base.role} machine (only once; takes some minutes)"
                )
                builder = Builder(label=f"base-{base.role}", base=base, image=vendor, disk_gib=MINIMUM_DISK_GIB)
                packages = build(session, builder, name, directory, lambda _, link: prepare_base(session, base, link))
            image = Image(
                name=name, kind="base", created_at=now(), cloud=session.cloud.name, base=vendor, packages=packages
            )
            session.images.finish(image, directory)
    return name


def family_image(session: Session, family: TaskFamily) -> tuple[str, SetupData]:
    """Returns the name of the family's image and its setup data; builds the image if it does not exist.

    Raises:
        ImageBuildError: a build step or install() failed.
        TaskFamilyError: the family's setup data is not valid.
    """
    kind = BaseImage(role="primary")
    base = base_image(session, kind)
    name = family_image_name(family, base, session.variables)
    with session.images.building(name, session.progress, session.cloud.has_image) as directory:
        if directory is not None:
            builder = Builder(label=family.name, base=kind, image=base, disk_gib=disk_gib(family))
            packages: tuple[str, ...] = ()
            if session.cloud.adopt(name, directory):
                session.progress.note(f"Reading the setup data of {family.name} from its image ({name})")
                adopted = replace(builder, image=name)
                setup = look_into(session, adopted, lambda driver: read_setup(session, driver))
            else:
                session.progress.note(f"Building the image of {family.name} ({name})")

                def fill(driver: TaskDriver, connection: Connection) -> tuple[SetupData, tuple[str, ...]]:
                    return fill_family(session, family, driver, connection), read_packages(connection)

                setup, packages = build(session, builder, name, directory, fill)
            write_atomically(directory / "setup-data.json", setup.model_dump_json(indent=2))
            image = Image(
                name=name,
                kind="family",
                created_at=now(),
                cloud=session.cloud.name,
                base=base,
                family=family.name,
                needs=tuple(sorted(_aux_image_names(session, family, setup))),
                packages=packages,
            )
            session.images.finish(image, directory)
    return name, session.images.setup_data(name)


def built_family_image(session: Session, family: TaskFamily) -> str | None:
    """Returns the name of the family's image on the newest base image, or None if it is not built yet."""
    bases = [
        i.name for i in session.images.all() if i.cloud == session.cloud.name and i.name.startswith("base-primary-")
    ]
    name = family_image_name(family, bases[-1], session.variables) if bases else ""
    return name if bases and session.images.finished(name) else None


def fitting_image(size: MachineSize, family: TaskFamily) -> MachineSize:
    """Returns a primary machine's size with a disk at least as large as the image's."""
    return size.model_copy(update={"disk_gib": max(size.disk_gib, disk_gib(family))})


def disk_gib(family: TaskFamily) -> int:
    """Returns the largest disk, in GiB, that any of the family's tasks asks for, since all boot from one image."""
    sizes = [task.resources.storage_gb or 0 for task in family.manifest.tasks.values()]
    return max(MINIMUM_DISK_GIB, math.ceil(max(sizes, default=0)))


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
            packages: tuple[str, ...] = ()

            def fill(driver: TaskDriver, connection: Connection) -> tuple[str, ...]:
                run_steps(session, family, spec.build_steps, driver, connection, AUX_ACCOUNT)
                return read_packages(connection)

            if not session.cloud.adopt(name, directory):
                session.progress.note(f"Building the aux VM's image of {family.name} ({name})")
                builder = Builder(label=family.name, base=kind, image=base, disk_gib=size.disk_gib)
                packages = build(session, builder, name, directory, fill)
            image = Image(
                name=name, kind="aux", created_at=now(), cloud=session.cloud.name, base=base, family=family.name,
                packages=packages,
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
