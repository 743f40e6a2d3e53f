"""Fills a builder: copies the base image's and the family's files, runs the build steps and install()."""

from __future__ import annotations

import hashlib
import posixpath
import tarfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from provisioner.clouds.guest_files import BASE_IMAGE, GUEST, guest_programs, packages
from provisioner.clouds.sizing import MINIMUM_DISK_GIB
from provisioner.errors import ImageBuildError, TaskError
from provisioner.family.files import digest_files, list_files
from provisioner.family.loader import TaskFamily
from provisioner.family.setup_data import parse_setup_data
from provisioner.models import BaseImage, BuildStep, FileBuildStep, Role, SetupData
from provisioner.printable import last_lines
from provisioner.remote.driver import TaskDriver
from provisioner.remote.output_tee import OutputTee
from provisioner.remote.ssh import COPY_SECONDS, Connection
from provisioner.session import Session
from provisioner.store.package_list import MAXIMUM_STATUS_BYTES, STATUS, installed_packages

# The driver and most build steps need these packages on an aux VM. Debian's own cloud image has them.
AUX_PACKAGES = ["ca-certificates", "curl", "iproute2", "python3", "sudo"]
PREPARATION = "/run/provisioner-base"
STATUS_SECONDS = 60


@dataclass(frozen=True)
class Account:
    """Names the user who runs build steps in a builder, with the interpreter and the directory.

    Args:
        interpreter: the program and arguments that run the commands of a shell step.
        home: the working directory of steps, to which destinations are relative.
        user: None for root, who also gets the environment file's variables.
    """

    interpreter: tuple[str, ...]
    home: PurePosixPath
    user: str | None

    @property
    def name(self) -> str:
        """Returns the user's name."""
        return self.user or "root"


ROOT = Account(interpreter=("bash", "-euo", "pipefail"), home=PurePosixPath("/root"), user=None)


def preparation_digest(session: Session, base: BaseImage) -> str:
    """Returns a hash of everything that prepare_base does to a vendor's image: 16 hexadecimal digits."""
    sha = hashlib.sha256(f"{base.model_dump_json()} {MINIMUM_DISK_GIB} {_packages(base.role)}".encode())
    sha.update(digest_files(BASE_IMAGE, _recipe()).encode() + digest_files(GUEST, guest_programs()).encode())
    if bundle := session.ca_bundle:
        sha.update(bundle.read_bytes())
    return sha.hexdigest()[:16]


def prepare_base(session: Session, base: BaseImage, connection: Connection) -> tuple[str, ...]:
    """Turns the vendor's system on a builder into a base image, and returns the packages that it then has.

    Raises:
        ImageBuildError: a file could not be copied, or a package not installed.
    """
    _send_tree(connection, BASE_IMAGE, _recipe(), PREPARATION)
    _send_tree(connection, GUEST, guest_programs(), f"{PREPARATION}/guest")
    if bundle := session.ca_bundle:
        with bundle.open("rb") as file:
            connection.write_file(f"{PREPARATION}/ca.pem", file)
    with OutputTee(session.redactor, session.output) as tee:
        done = connection.run(
            ["sh", f"{PREPARATION}/prepare.sh", base.role, PREPARATION, *_packages(base.role)],
            on_stdout=tee.stream(),
            on_stderr=tee.stream(),
            timeout_seconds=_limit(session),
        )
    _require(done.exit_code, done.stdout[-1500:] + done.stderr, "preparing the base image")
    return read_packages(connection)


def read_packages(connection: Connection) -> tuple[str, ...]:
    """Returns the packages that a builder has by its own word, as NAME:ARCHITECTURE=VERSION."""
    answer = connection.run(["cat", f"/{STATUS}"], timeout_seconds=STATUS_SECONDS, limit_bytes=MAXIMUM_STATUS_BYTES)
    return installed_packages(answer.stdout)


def _limit(session: Session) -> float:
    """Returns how long a step of a build may take: no longer than the builder lives."""
    return session.builder_ttl.total_seconds()


def _packages(role: Role) -> list[str]:
    return packages() + packages("python/packages.txt") if role == "primary" else AUX_PACKAGES


def _recipe() -> list[str]:
    """Returns the files of BASE_IMAGE that a vendor's system needs."""
    return [name for name in list_files(BASE_IMAGE, BASE_IMAGE) if not name.startswith("local/")]


def files_of(family: TaskFamily, source: str) -> tuple[str, ...]:
    """Returns the files that a build step's source names, relative to the family's directory."""
    path = family.directory / source
    return list_files(family.directory, path) if path.is_dir() else (source,)


def fill_family(session: Session, family: TaskFamily, driver: TaskDriver, connection: Connection) -> SetupData:
    """Copies the family, runs its build steps and install(), and reads its setup data.

    Raises:
        ImageBuildError: a build step or install() failed.
        TaskFamilyError: the family's setup data is not valid.
    """
    _send_tree(connection, family.directory, family.files, "/root")
    run_steps(session, family, family.build_steps, driver, connection, ROOT)
    answer = driver.call("install", environment=session.variables, timeout_seconds=_limit(session))
    try:
        answer.value("install()")
    except TaskError as error:
        raise ImageBuildError(f"{family.name}: {error.message}", details=error.details) from error
    return read_setup(session, driver)


def read_setup(session: Session, driver: TaskDriver) -> SetupData:
    """Reads a family's setup data in a machine that has its image.

    Raises:
        TaskFamilyError: the setup data is not valid.
    """
    read = driver.call("setup", given=dict(session.variables), timeout_seconds=_limit(session))
    return parse_setup_data(read.value("reading the family's setup data"))


def run_steps(
    session: Session,
    family: TaskFamily,
    steps: tuple[BuildStep, ...],
    driver: TaskDriver,
    connection: Connection,
    account: Account,
) -> None:
    """Runs build steps in order.

    Args:
        account: the user who runs them, and the directory.

    Raises:
        ImageBuildError: a step failed.
    """
    for number, step in enumerate(steps, start=1):
        what = f"{family.name}: build step {number} ({step.type})"
        session.progress.note(what)
        if isinstance(step, FileBuildStep):
            _copy(connection, family, step, account, what)
            continue
        answer = driver.call(
            "shell",
            commands=list(step.commands),
            shell=list(account.interpreter),
            cwd=str(account.home),
            user=account.user,
            environment=session.variables if account.user is None else {},
            timeout_seconds=_limit(session),
        )
        try:
            answer.value(what)
        except TaskError as error:
            raise ImageBuildError(error.message, details=error.details) from error


def _copy(connection: Connection, family: TaskFamily, step: FileBuildStep, account: Account, what: str) -> None:
    """Copies a file to the step's destination, or a directory's contents into it."""
    source = family.directory / step.source
    # PurePosixPath would drop a slash at the end.
    destination = posixpath.join(account.home, step.destination)
    if source.is_dir():
        prefix = source.relative_to(family.directory)
        files = [str(Path(file).relative_to(prefix)) for file in files_of(family, step.source)]
        _send_tree(connection, source, files, destination, account, what)
        return
    # Into a destination that is a directory, or ends in a slash, the file goes under its own name.
    script = """
    case $1 in */) mkdir -p "$1" ;; *) mkdir -p "$(dirname "$1")" ;; esac
    [ ! -d "$1" ] || set -- "$1/$2" "$2" "$3"
    cat > "$1"
    chmod "$3" "$1"
    """
    mode = "755" if source.stat().st_mode & 0o100 else "644"
    with source.open("rb") as file:
        argv = ["sh", "-ec", script, "sh", destination, source.name, mode]
        done = connection.run(argv, user=account.name, stdin=file, timeout_seconds=COPY_SECONDS)
    _require(done.exit_code, done.stderr, what)


def _send_tree(
    connection: Connection,
    source: Path,
    files: tuple[str, ...] | list[str],
    destination: str,
    account: Account = ROOT,
    what: str = "copying the family's files",
) -> None:
    """Copies files into a directory of the machine. Root owns them there; in /root the agent cannot read them."""

    def owned_by_root(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = 0
        info.uname = info.gname = "root"
        info.mode = 0o755 if info.isdir() or info.mode & 0o100 else 0o644
        return info

    def fill(archive: tarfile.TarFile) -> None:
        for name in files:
            archive.add(source / name, arcname=name, recursive=False, filter=owned_by_root)

    script = 'mkdir -p "$1" && exec tar -x -C "$1" --no-same-owner --no-overwrite-dir'
    done = connection.send_tree(["sh", "-c", script, "sh", destination], fill, user=account.name)
    _require(done.exit_code, done.stderr, what)


def _require(exit_code: int, stderr: bytes, what: str) -> None:
    if exit_code != 0:
        raise ImageBuildError(
            f"{what} failed with exit code {exit_code}.", details=last_lines(stderr.decode(errors="replace"), 2000)
        )
