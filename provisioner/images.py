"""Family and aux images: built once in a builder machine with internet, named by all that went into them.

The family's own code runs in the builder, never on the controller. What is in the image when the builder is
powered off is what every environment of the family boots from.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import TypeVar

from provisioner import machines
from provisioner.clouds.base_image import GUEST
from provisioner.environments import new_id
from provisioner.errors import ImageBuildError, MachineLostError, TaskError
from provisioner.family_files import digest_files, list_files
from provisioner.image_store import Image, now
from provisioner.models import (
    BuildStep,
    Environment,
    FileBuildStep,
    MachineRecord,
    MachineSize,
    SetupData,
    TaskSetup,
    VMSpec,
)
from provisioner.paths import write_atomically
from provisioner.session import Session
from provisioner.setup_data import parse_setup_data
from provisioner.ssh import Connection
from provisioner.task_driver import TaskDriver
from provisioner.task_family import TaskFamily, check_build_steps, family_digest

BUILDER_CPUS = 2
BUILDER_MEMORY_GIB = 4.0
BUILDER_DISK_GIB = 16
POWER_OFF_SECONDS = 120
# Shorter values would be found by accident.
SECRET_SCAN_MIN_LENGTH = 8
AUX_SHELL = ["/bin/sh", "-e"]
FAMILY_SHELL = ["bash", "-euo", "pipefail"]

Result = TypeVar("Result")


def family_image_name(family: TaskFamily, base: str, variables: Mapping[str, str]) -> str:
    """The name of a family's image: base image, files, build steps, variables. Pure but for reading the files."""
    sha = hashlib.sha256(f"{base}\0{family_digest(family)}\0".encode())
    sha.update(json.dumps(sorted(variables.items())).encode())
    return f"family-{family.name.replace('_', '-')}-{sha.hexdigest()[:16]}"


def aux_image_name(family: TaskFamily, base: str, spec: VMSpec) -> str:
    """The name of an aux image: base image, the spec's build steps, and the files that they copy."""
    sha = hashlib.sha256(f"{base}\0".encode())
    for step in spec.build_steps:
        sha.update(step.model_dump_json().encode())
        if isinstance(step, FileBuildStep):
            sha.update(_content_digest(family, step.source))
    return f"aux-{family.name.replace('_', '-')}-{sha.hexdigest()[:16]}"


def _content_digest(family: TaskFamily, source: str) -> bytes:
    return digest_files(family.directory, _files_of(family, source)).encode()


def _files_of(family: TaskFamily, source: str) -> tuple[str, ...]:
    """The files that a build step's source means, relative to the family's directory."""
    path = family.directory / source
    return list_files(family.directory, path) if path.is_dir() else (source,)


def family_image(session: Session, family: TaskFamily) -> tuple[str, SetupData]:
    """The family's image and setup data, built where they are missing.

    Raises:
        ImageBuildError: a build step or install() failed.
        TaskFamilyError: the family's setup data is not valid.
    """
    base = session.cloud.base_image("primary", session.progress)
    name = family_image_name(family, base, session.variables)
    with session.images.building(name, session.progress) as directory:
        if directory is not None:
            session.progress.note(f"Building the image of {family.name} ({name})")
            setup = _build(
                session, family, base, directory, lambda driver, link: _fill_family(session, family, driver, link)
            )
            assert setup is not None
            write_atomically(directory / "setup-data.json", setup.model_dump_json(indent=2))
            needs = tuple(sorted(_aux_image_names(session, family, setup)))
            image = Image(name=name, kind="family", created_at=now(), base=base, family=family.name, needs=needs)
            session.images.finish(image, directory)
    return name, session.images.setup_data(name)


def _aux_image_names(session: Session, family: TaskFamily, setup: SetupData) -> set[str]:
    specs = [task.aux_vm_spec for task in setup.tasks.values() if task.aux_vm_spec and task.aux_vm_spec.build_steps]
    if not specs:
        return set()
    base = session.cloud.base_image("aux", session.progress)
    for spec in specs:
        check_build_steps(spec.build_steps, family.directory)
    return {aux_image_name(family, base, spec) for spec in specs}


def aux_image(session: Session, family: TaskFamily, spec: VMSpec) -> str:
    """The aux VM's image, built where it is missing. Without build steps it is the base image.

    Raises:
        ImageBuildError: a build step failed.
        TaskFamilyError: a build step names a file that is not in the family.
    """
    base = session.cloud.base_image("aux", session.progress)
    if not spec.build_steps:
        return base
    check_build_steps(spec.build_steps, family.directory)
    name = aux_image_name(family, base, spec)
    with session.images.building(name, session.progress) as directory:
        if directory is not None:
            session.progress.note(f"Building the aux VM's image of {family.name} ({name})")

            def fill(driver: TaskDriver, connection: Connection) -> None:
                home = f"/home/{machines.AUX_USER}"
                _run_steps(session, family, spec.build_steps, driver, connection, AUX_SHELL, home, machines.AUX_USER)

            _build(session, family, base, directory, fill)
            image = Image(name=name, kind="aux", created_at=now(), base=base, family=family.name)
            session.images.finish(image, directory)
    return name


def build_all(session: Session, family: TaskFamily) -> tuple[str, list[str]]:
    """Builds the family's image and every aux image that its tasks ask for.

    Returns:
        the family image's name and the aux images' names.
    """
    name, setup = family_image(session, family)
    specs = [task.aux_vm_spec for task in setup.tasks.values() if task.aux_vm_spec]
    return name, sorted({aux_image(session, family, spec) for spec in specs})


def _build(
    session: Session,
    family: TaskFamily,
    base: str,
    directory: Path,
    fill: Callable[[TaskDriver, Connection], Result],
) -> Result:
    """Boots a builder from `base`, fills it, powers it off and captures its disk. The builder always goes."""
    storage = max([task.resources.storage_gb or 0 for task in family.manifest.tasks.values()], default=0)
    size = MachineSize(cpus=BUILDER_CPUS, memory_gib=BUILDER_MEMORY_GIB, disk_gib=max(BUILDER_DISK_GIB, int(storage)))
    identity = new_id(f"build-{family.name}", None)
    builder = Environment(
        id=identity,
        kind="builder",
        cloud=session.cloud.name,
        stack=identity,
        family=family.name,
        task=None,
        status="creating",
        created_at=now(),
        setup=TaskSetup(),
        full_internet=True,
        machines={"primary": MachineRecord(image=base, size=size, user="root")},
    )
    with machines.held(session, builder):
        try:
            machines.record(session, builder)
            [builder] = machines.create(session, [builder])
            connection = machines.boot(session, builder)["primary"]
            logs = session.environments.logs(builder.id)
            with connection:
                driver = TaskDriver(connection, family.name, session.redactor, session.output, logs)
                result = fill(driver, connection)
                _require_no_secrets(session, connection)
                _clean_and_power_off(connection)
            _wait_until_off(session, builder)
            session.cloud.capture(builder, directory)
        except ImageBuildError as error:
            error.hint = error.hint or f"provisioner logs {builder.id} shows all that it said."
            raise
        finally:
            with session.shield():
                machines.keep_logs(session, builder)
                machines.destroy(session, builder)
    return result


def _fill_family(session: Session, family: TaskFamily, driver: TaskDriver, connection: Connection) -> SetupData:
    _send_tree(connection, family.directory, family.files, "/root")
    _run_steps(session, family, family.build_steps, driver, connection, FAMILY_SHELL, "/root", None)
    answer = driver.call("install", environment=session.variables)
    try:
        answer.value("install()")
    except TaskError as error:
        raise ImageBuildError(f"{family.name}: {error.message}", details=error.details) from error
    read = driver.call("setup", given=dict(session.variables))
    return parse_setup_data(read.value("reading the family's setup data"))


def _run_steps(
    session: Session,
    family: TaskFamily,
    steps: tuple[BuildStep, ...],
    driver: TaskDriver,
    connection: Connection,
    shell: list[str],
    home: str,
    user: str | None,
) -> None:
    for number, step in enumerate(steps, start=1):
        what = f"{family.name}: build step {number} ({step.type})"
        session.progress.note(what)
        if isinstance(step, FileBuildStep):
            _copy(connection, family, step.source, str(PurePosixPath(home) / step.destination), user, what)
            continue
        answer = driver.call(
            "shell",
            commands=list(step.commands),
            shell=shell,
            cwd=home,
            user=user,
            environment=session.variables if user is None else {},
        )
        try:
            answer.value(what)
        except TaskError as error:
            raise ImageBuildError(error.message, details=error.details) from error


def _copy(connection: Connection, family: TaskFamily, name: str, destination: str, user: str | None, what: str) -> None:
    """Copies a file to `destination`, or a directory's contents into it."""
    source = family.directory / name
    if source.is_dir():
        inside = [str(Path(file).relative_to(source.relative_to(family.directory))) for file in _files_of(family, name)]
        _send_tree(connection, source, inside, destination, user, what)
        return
    # A destination that is a directory, or ends like one, takes the file under its own name.
    script = """
    case $1 in */) mkdir -p "$1" ;; *) mkdir -p "$(dirname "$1")" ;; esac
    [ ! -d "$1" ] || set -- "$1/$2" "$2" "$3"
    cat > "$1"
    chmod "$3" "$1"
    """
    mode = "755" if source.stat().st_mode & 0o100 else "644"
    with source.open("rb") as file:
        done = connection.run([*_as(user), "sh", "-ec", script, "sh", destination, source.name, mode], stdin=file)
    _require(done.exit_code, done.stderr, what)


def _as(user: str | None) -> list[str]:
    return ["runuser", "-u", user, "--"] if user else []


def _send_tree(
    connection: Connection,
    source: Path,
    files: tuple[str, ...] | list[str],
    destination: str,
    user: str | None = None,
    what: str = "copying the family's files",
) -> None:
    """Copies files into a directory of the machine: owned by root there, and closed to the agent in /root."""

    def member(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = 0
        info.uname = info.gname = "root"
        info.mode = 0o755 if info.isdir() or info.mode & 0o100 else 0o644
        return info

    def fill(archive: tarfile.TarFile) -> None:
        for name in files:
            archive.add(source / name, arcname=name, recursive=False, filter=member)

    script = 'mkdir -p "$1" && exec tar -x -C "$1" --no-same-owner --no-overwrite-dir'
    done = connection.send_tree([*_as(user), "sh", "-c", script, "sh", destination], fill)
    _require(done.exit_code, done.stderr, what)


def _require(exit_code: int, stderr: bytes, what: str) -> None:
    if exit_code != 0:
        raise ImageBuildError(
            f"{what} failed with exit code {exit_code}.", details=stderr.decode(errors="replace")[-2000:]
        )


def _require_no_secrets(session: Session, connection: Connection) -> None:
    """Looks for the environment file's values in every file that the build wrote.

    Raises:
        ImageBuildError: one was left; an image would keep it for every later environment and agent.
    """
    secrets = {name: value for name, value in session.variables.items() if len(value) >= SECRET_SCAN_MIN_LENGTH}
    if not secrets:
        return
    program = (GUEST / "secret_scan.py").read_bytes()
    found = connection.run(["python3", "-I", "-c", program.decode()], stdin=json.dumps(secrets).encode())
    if found.exit_code != 0:
        raise MachineLostError(
            "The builder could not be searched for secrets.", details=found.stderr.decode(errors="replace")[-500:]
        )
    lines = found.stdout.decode(errors="replace").splitlines()
    if lines:
        raise ImageBuildError(
            "Building left secrets in the image: " + session.redactor.redact("; ".join(lines[:10])),
            hint="A secret must not stay in an image: read it in start(), through required_environment_variables.",
        )


def _clean_and_power_off(connection: Connection) -> None:
    """Removes what belongs to the builder and not to the image, then powers it off."""
    script = """
    rm -rf /var/lib/provisioner /run/provisioner /etc/ssh/authorized_keys.d /etc/ssh/ssh_host_* /root/.cache/pip
    rm -f /root/.bash_history /home/*/.bash_history /root/.python_history /var/log/apt/* /var/log/dpkg.log
    : > /etc/resolv.conf
    : > /etc/machine-id
    apt-get clean
    sync
    systemctl --no-block poweroff
    """
    connection.run(["sh", "-c", script])


def _wait_until_off(session: Session, builder: Environment) -> None:
    deadline = time.monotonic() + POWER_OFF_SECONDS
    while session.cloud.alive(builder, "primary"):
        if time.monotonic() > deadline:
            raise MachineLostError(
                "The builder does not power off.", details=session.cloud.console(builder, "primary")[-1500:]
            )
        time.sleep(0.2)
