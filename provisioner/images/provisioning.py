"""Fills a builder: the base image's files, then build steps, the family's files and install()."""

from __future__ import annotations

import contextlib
import hashlib
import posixpath
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from provisioner.base.errors import ImageBuildError, TaskError, raised_in
from provisioner.base.models import BaseImage, BuildStep, FileBuildStep, Role, SetupData, ShellBuildStep
from provisioner.base.printable import beginning, last_lines, printable
from provisioner.base.validation import shown
from provisioner.clouds.guest_files import BASE_IMAGE, GUEST, guest_programs, packages
from provisioner.clouds.sizing import MINIMUM_DISK_GIB
from provisioner.copying.transfer import Fill, send_archive, send_input
from provisioner.driver.output_tee import OutputTee
from provisioner.driver.task_driver import TaskDriver
from provisioner.family.files import digest_files, list_files
from provisioner.family.loader import TaskFamily
from provisioner.family.setup_data import parse_setup_data
from provisioner.session import Session
from provisioner.ssh.connection import Connection
from provisioner.store.images import MAXIMUM_STATUS_BYTES, STATUS, installed_packages

HOME = "/root"
# Shorter values would match by accident.
SECRET_SCAN_MIN_LENGTH = 8
WITHOUT_SECRETS = (
    "Leave the file out of the family, and let install() write none. If the task needs the file: list the variable in "
    "required_environment_variables, and write the file in start(), from os.environ. "
    "docs/authoring/secrets.md#give-the-agent-a-file-with-a-secret shows how."
)


@contextlib.contextmanager
def reading(file: str) -> Iterator[None]:
    """Reads a file of a family in its body.

    Raises:
        ImageBuildError: the file cannot be read, as when it was removed or cut off meanwhile.
    """
    try:
        yield
    except OSError as error:
        raise ImageBuildError(
            f"{shown(file)} cannot be read: {error.strerror or error}.",
            hint="If the file changed meanwhile, run the command again.",
        ) from error


def filler(source: Path, files: Iterable[str]) -> Fill:
    """Returns what adds files to an archive. Root owns them there; in /root the agent cannot read them.

    It raises ImageBuildError if one cannot be read.
    """

    def owned_by_root(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = 0
        info.uname = info.gname = "root"
        info.mode = 0o755 if info.isdir() or info.mode & 0o100 else 0o644
        return info

    def fill(archive: tarfile.TarFile) -> None:
        for name in files:
            with reading(name):
                archive.add(source / name, arcname=name, recursive=False, filter=owned_by_root)

    return fill


# The driver and most build steps need these packages on an aux VM. Debian's own cloud image has them.
AUX_PACKAGES = ["ca-certificates", "curl", "iproute2", "python3", "sudo"]
PREPARATION = "/run/provisioner-base"
STATUS_SECONDS = 60
_PART = "# provisioner: "
TITLE_CHARACTERS = 100
# `provisioner tasks` lists all.
SHOWN_WARNINGS = 20


@dataclass(frozen=True)
class Account:
    """Names the user that runs build steps in a builder, with the interpreter and the directory.

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


def install(
    session: Session,
    family: TaskFamily,
    driver: TaskDriver,
    connection: Connection,
    require_unchanged: Callable[[], None],
) -> None:
    """Copies the files that install() sees, and runs it.

    Args:
        require_unchanged: called when files were copied, to check that they are those that the image is named by.

    Raises:
        ImageBuildError: it failed, or files changed meanwhile.
    """
    _send_tree(connection, family.directory, family.install_files, HOME)
    require_unchanged()
    if not family.hostname:
        session.progress.note(f"{family.title}: import and install()")
    with raised_in("install"):
        answer = driver.call("install", environment=session.variables, timeout_seconds=_limit(session))
        try:
            answer.value("importing the family or install()")
        except TaskError as error:
            hint = error.hint
            if family.manifest.install_inputs is not None:
                seen = "install() sees only the files that the manifest's install_inputs names, and the module."
                hint = f"{hint} {seen}" if hint else seen
            raise ImageBuildError(f"{family.title}: {error.message}", hint=hint, details=error.details) from error


def send_other_files(family: TaskFamily, connection: Connection, require_unchanged: Callable[[], None]) -> None:
    """Copies the files that install() does not see.

    Args:
        require_unchanged: as for install.

    Raises:
        ImageBuildError: files changed meanwhile.
    """
    if family.manifest.install_inputs is None:
        return
    seen = set(family.install_files)
    _send_tree(connection, family.directory, [name for name in family.files if name not in seen], HOME)
    require_unchanged()


def read_setup(session: Session, driver: TaskDriver) -> SetupData:
    """Reads a family's setup data in a machine that has its image, and tells the warnings.

    Raises:
        TaskFamilyError: the setup data is not valid.
    """
    with raised_in("setup"):
        read = driver.call("setup", given=dict(session.variables), timeout_seconds=_limit(session))
        setup = parse_setup_data(read.value("reading the family's setup data"))
    for warning in setup.all_warnings[:SHOWN_WARNINGS]:
        session.progress.note(f"warning: {warning}")
    if (more := len(setup.all_warnings) - SHOWN_WARNINGS) > 0:
        session.progress.note(f"warning: there are {more} more warnings; `provisioner tasks` lists them")
    return setup


def run_steps(
    session: Session,
    family: TaskFamily,
    steps: tuple[BuildStep, ...],
    driver: TaskDriver,
    connection: Connection,
    account: Account,
    *,
    done: int = 0,
    after: Callable[[int], None] = lambda _: None,
) -> None:
    """Runs build steps in order.

    Args:
        account: the user that runs them, and the directory.
        done: how many of them the builder's image has already.
        after: called after each step with the number of those that are done.

    Raises:
        ImageBuildError: a step failed.
    """
    for number, step in enumerate(steps[done:], start=done + 1):
        for title, script in _parts(family, number, step):
            what = f"{family.title}: {title}"
            session.progress.note(what)
            if isinstance(step, FileBuildStep):
                _copy(connection, family, step, account, what)
                continue
            if files := family.files_of(step):
                _send_tree(connection, family.directory, files, HOME, what, "keep")
            with raised_in("build step"):
                _run(session, script, driver, account, what)
        after(number)


def part(title: str) -> str:
    """Returns the line of a script that says what the rest does, up to the next such line; for our own families."""
    return _PART + " ".join(title.split())


def _parts(family: TaskFamily, number: int, step: BuildStep) -> list[tuple[str, list[str]]]:
    """Returns the scripts of a build step, each with what messages call it. Only our own families have several."""
    if not family.hostname:
        return [(f"build step {number} ({step.type})", list(step.commands) if isinstance(step, ShellBuildStep) else [])]
    if isinstance(step, FileBuildStep):
        return [(f"copy {step.destination}", [])]
    text = "\n".join(step.commands)
    if not text.startswith(_PART):
        first, _, _ = text.strip().partition("\n")
        text = f"{part(f'run {first}')}\n{text}"
    parts = [each.partition("\n") for each in f"\n{text}".split(f"\n{_PART}")[1:]]
    return [(beginning(printable(title), TITLE_CHARACTERS), [script]) for title, _, script in parts]


def _run(session: Session, script: list[str], driver: TaskDriver, account: Account, what: str) -> None:
    answer = driver.call(
        "shell",
        commands=script,
        shell=list(account.interpreter),
        cwd=str(account.home),
        user=account.user,
        environment=session.variables if account.user is None else {},
        timeout_seconds=_limit(session),
    )
    try:
        answer.value(what)
    except TaskError as error:
        raise ImageBuildError(error.message, hint=error.hint, details=error.details) from error


def _copy(connection: Connection, family: TaskFamily, step: FileBuildStep, account: Account, what: str) -> None:
    """Copies a file to the step's destination, or a directory's contents into it."""
    source = family.directory / step.source
    # PurePosixPath would drop a slash at the end.
    destination = posixpath.join(account.home, step.destination)
    if source.is_dir():
        prefix = source.relative_to(family.directory)
        files = [str(Path(file).relative_to(prefix)) for file in family.files_of(step)]
        _send_tree(connection, source, files, destination, what, user=account.name)
        return
    with contextlib.ExitStack() as opened:
        with reading(step.source):
            file = opened.enter_context(source.open("rb"))
            mode = "755" if source.stat().st_mode & 0o100 else "644"
        done = send_input(connection, file, "write", destination, source.name, mode, user=account.name)
    _require(done.exit_code, done.stderr, what)


def _send_tree(
    connection: Connection,
    source: Path,
    files: tuple[str, ...] | list[str],
    destination: str,
    what: str = "copying the family's files",
    *options: str,
    user: str = "root",
) -> None:
    """Copies files into a directory of the machine."""
    done = send_archive(connection, filler(source, files), "fill", destination, *options, user=user)
    _require(done.exit_code, done.stderr, what)


def _require(exit_code: int, stderr: bytes, what: str) -> None:
    if exit_code != 0:
        raise ImageBuildError(
            f"{what} failed with exit code {exit_code}.", details=last_lines(stderr.decode(errors="replace"), 2000)
        )
