"""Freezes a machine that has booted and waits for its credentials, so that other machines resume from there.

Its QEMU ends with the process that started it, as the machine belongs to no environment. Standard library only.

A template is a directory beside the image's disk: the machine's memory, its devices' state and a layer over the
image's disk. It belongs to one image, size and set of cards, to one QEMU, and to one boot of this host: what a crash of
the host left half-written is never used. The machine has no identity yet: credentials.pl waits for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from provisioner.base import child_environment, unix_socket
from provisioner.base.printable import last_lines, printable
from provisioner.clouds.local.frozen import memory_files
from provisioner.clouds.local.vm import bubblewrap, confinement, credential_port, disk, machine_logs, qemu, shutdown
from provisioner.store.files import locked, read_end, remove_tree
from provisioner.store.home import TEMPLATES, UNFINISHED

# The machine's memory, from which other machines resume, is a file, too.
MEMORY, STATE, DISK, RECORD = "memory", "state", "disk.qcow2", "template.json"
CONTROL_SECONDS = 60
# Not in preexec_fn: it would run Python between fork and exec, where another thread's locks stay locked for ever.
_WITHOUT_NETWORK = (sys.executable, "-m", confinement.__name__)
_ENDS_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL", "--")


def adapted(launch: qemu.Launch) -> qemu.Launch:
    """Returns how such a machine starts: its private link's sockets have the same names everywhere, and lead nowhere.

    Args:
        launch: how the machines start that will resume from it.
    """
    link = ((f"{qemu.RUN}/link.sock", f"{qemu.RUN}/nowhere.sock"),) if launch.link else ()
    return replace(launch, memory=MEMORY, frozen=False, link=link, capture=False)


@contextlib.contextmanager
def running(
    launch: qemu.Launch, directory: Path, layer: str, seconds: float, *arguments: str
) -> Iterator[tuple[subprocess.Popen[bytes], qemu.QMP]]:
    """Runs a machine, and yields its process and its control connection. Ends it afterwards.

    Args:
        launch: how the machines start that will resume from it.
        directory: where it runs.
        layer: the name of its disk there.
        seconds: when it ends in any case.
        arguments: more of QEMU's.

    Raises:
        OSError, subprocess.SubprocessError: it could not be started.
        qemu.QMPError: it ended, or refused something; with what it said.
    """
    launch = adapted(launch)
    shutdown.prepare(directory)
    own = [directory / qemu.RUN, directory / MEMORY]
    own[1].touch(mode=0o600)
    ours, theirs = socket.socketpair()
    with (
        ours, theirs, disk.opened(directory / layer) as disk_fds, (directory / "qemu.log").open("ab") as log,
        confinement.place_for_card() as card, bubblewrap.system_calls() as filtered,
    ):  # fmt: skip
        launch = replace(launch, disk_fds=disk_fds, management_fd=card.fileno())
        if launch.internet_fd is not None:
            launch = replace(launch, internet_fd=theirs.fileno())
        options = ("--die-with-parent", "--seccomp", str(filtered))
        process = subprocess.Popen(
            [
                *_ENDS_WITH_PARENT, *_WITHOUT_NETWORK, str(card.fileno()), "timeout", "--signal=KILL", f"{seconds:g}",
                *qemu.enclosed(launch, own, disk.chain(directory / layer), *options),
                *qemu.command(launch), *arguments,
            ],
            cwd=directory, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            pass_fds=[theirs.fileno(), card.fileno(), filtered, *disk_fds],
            env=child_environment.for_python(os.environ),
        )  # fmt: skip
        try:
            deadline = time.monotonic() + CONTROL_SECONDS
            with qemu.wait_for_qmp(lambda: process.poll() is None, deadline, directory) as qmp:
                yield process, qmp
        except qemu.QMPError as error:
            said = read_end(directory / "qemu.log", 500).decode(errors="replace").strip()
            raise qemu.QMPError(f"{error} {said}".strip()) from error
        finally:
            process.kill()
            process.wait()


CONSOLE = "serial.log"
PARTS = (MEMORY, STATE, DISK, CONSOLE, RECORD)
CHECKED = (MEMORY, STATE, DISK)
# A template's disk takes some MiB; a snapshot's, what its machine has written since its image.
DISK_HASH_BYTES = 256 << 20
# Two emulated machines on one busy core need about a minute. No healthy machine needs this long.
BOOT_SECONDS = 150
# A machine whose CPU is emulated hung twice as it booted on a busy host, most likely as its kernel tested the timer
# (qemu.EMULATED_BOOT); its console had not been read.
BOOTS = 2
# How much of the console the error shows if the machine does not ask for its credentials.
CONSOLE_BYTES = 300
FREEZE_SECONDS = 60
# How long a starting machine waits while another process copies the template's memory or looks for a copy: this long,
# and longer for each GiB. A destroy may wait as long.
COPY_SECONDS = 30
COPY_SECONDS_PER_GIB = 10
# The state of the devices takes less than a MiB. One that was taken over could write for as long as it is waited for.
STATE_LIMIT_BYTES = 64 << 20
# Longer than a process looks for a copy, and shorter than any boot.
DISCARD_SECONDS = 1.0
# A template that could not be made is not tried again for so long.
FAILURE_SECONDS = 600.0
LOOK_SECONDS = 0.5
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class TemplateError(Exception):
    """There is no template to start from. The message says why, in one line."""


@dataclass(frozen=True)
class Template:
    """A finished template.

    Args:
        directory: what it consists of.
        made: identifies this making of the template, since another may replace it; empty if that does not matter.
    """

    directory: Path
    made: str = field(default="", compare=False)

    @property
    def failure(self) -> Path:
        """Why it could not be made at the last try."""
        return self.directory.with_name(f"{self.directory.name}.failed")

    @property
    def disk(self) -> Path:
        """The layer over the image's disk."""
        return self.directory / DISK

    @property
    def lock(self) -> Path:
        """The lock of a process that makes the template or looks for a copy of its memory."""
        return self.directory.with_name(f"{self.directory.name}.lock")

    @property
    def holders(self) -> Path:
        """The processes that have a copy of its memory (memory_files.py)."""
        return self.directory / "holders.json"

    @property
    def memory(self) -> Path:
        """The machine's memory."""
        return self.directory / MEMORY


def key(image: Path, launch: qemu.Launch) -> str:
    """Names the template of a machine: the host's boot, and a hash of all that its state depends on.

    Args:
        image: the image's disk.
        launch: how the machine will start; what differs from one machine of the kind to another does not count.
    """
    internet = None if launch.internet_fd is None else 0
    alike = replace(launch, disk_fds=(), kernel="", initrd="", user=None, management_fd=0, internet_fd=internet)
    program = Path(shutil.which(qemu.PROGRAM) or qemu.PROGRAM)
    files = [program, image, Path(launch.kernel), Path(launch.initrd)]
    # Its disk names the image's by its path: a home that has moved needs new templates.
    parts = [
        qemu.command(adapted(alike)),
        str(image.resolve()),
        [disk.identity(path) for path in files],
    ]
    return f"{_boot()}-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]}"


def _boot() -> str:
    return BOOT_ID.read_text()[:8]


def obtain(image: Path, launch: qemu.Launch, tell: Callable[[str], None]) -> Template:
    """Returns the template for a machine. The first that asks makes it; others wait meanwhile.

    Args:
        image: the image's disk.
        launch: how the machine will start; its internet_fd may be any number.
        tell: receives a line when it begins to make a template, when it has made one, and when it waits for one.

    Raises:
        TemplateError: it cannot be made.
    """
    try:
        name = key(image, launch)
        home = image.parent / TEMPLATES
        template = Template(home / name)
        if usable(template, launch):
            return replace(template, made=_made(template.directory))
        size = f"{launch.cpus} CPU{'s' * (launch.cpus > 1)} and {launch.memory_mib / 1024:g} GiB of memory"
        what = f"a template of {image.parent.name} with {size}"
        home.mkdir(mode=0o700, exist_ok=True)
        waiting = f"Waiting for {what}, which another start makes"
        with locked(template.lock, on_wait=lambda: tell(waiting), make_parents=False):
            if not usable(template, launch):
                _require_no_recent_failure(template)
                begin = time.monotonic()
                tell(f"Making {what} (once for each size of machine; takes as long as a boot)")
                with contextlib.suppress(OSError):
                    remove_tree(template.directory)
                _remove_outdated(home)
                try:
                    _make(template, image, launch)
                except (OSError, subprocess.SubprocessError, qemu.QMPError) as error:
                    template.failure.write_text(str(error))
                    raise
                template.failure.unlink(missing_ok=True)
                tell(f"Made {what} ({time.monotonic() - begin:.1f} s)")
        return replace(template, made=_made(template.directory))
    except (OSError, ValueError, subprocess.SubprocessError, qemu.QMPError) as error:
        raise TemplateError(f"no template could be made: {error}") from error


def usable(template: Template, launch: qemu.Launch) -> bool:
    """Whether a template is there, has all its parts in their sizes, and is our own user's.

    What is in them is compared once it is needed (`opened`).
    """
    try:
        record = json.loads((template.directory / RECORD).read_bytes())
        for path in (template.directory, *(template.directory / name for name in PARTS)):
            status = path.lstat()
            if status.st_uid != os.geteuid() or status.st_mode & 0o022:
                return False
        sizes = [(template.directory / name).stat().st_size == record[name]["bytes"] for name in CHECKED]
        return all(sizes) and template.memory.stat().st_size == launch.memory_mib << 20
    except (OSError, ValueError, LookupError, TypeError):
        return False


def discard(template: Template) -> None:
    """Removes a template, unless another start makes it anew or has. Machines that run from it keep its files open."""
    with (
        contextlib.suppress(OSError),
        locked(template.lock, wait_seconds=DISCARD_SECONDS, make_parents=False),
    ):
        if template.made in ("", _made(template.directory)):
            remove_tree(template.directory)


def _made(directory: Path) -> str:
    """Tells a template from another of the same name. Empty if there is none."""
    try:
        status = (directory / RECORD).stat()
    except OSError:
        return ""
    return f"{status.st_ino} {status.st_ctime_ns}"


def _require_no_recent_failure(template: Template) -> None:
    """Raises OSError if a try to make it has failed just now: each try takes as long as a boot."""
    with contextlib.suppress(FileNotFoundError):
        seconds = time.time() - template.failure.stat().st_mtime
        if 0 <= seconds < FAILURE_SECONDS:
            raise OSError(f"that failed {seconds:.0f} s ago: {template.failure.read_text()[:500]}")


def _remove_outdated(home: Path) -> None:
    """Removes the templates that an earlier boot of this host has left."""
    for path in home.iterdir():
        if not path.name.removeprefix(UNFINISHED).startswith(f"{_boot()}-"):
            with contextlib.suppress(OSError):
                if path.is_dir():
                    remove_tree(path)
                else:
                    path.unlink()


def _make(template: Template, image: Path, launch: qemu.Launch) -> None:
    """Boots a machine, freezes it, and moves its files to the template's place; leaves nothing if that fails."""
    directory = template.directory.with_name(f"{UNFINISHED}{template.directory.name}")
    for boots_left in reversed(range(BOOTS)):
        remove_tree(directory)
        directory.mkdir(mode=0o700)
        try:
            disk.create(directory / DISK, image)
            disk_gib = disk.seen_gib(directory / DISK)
            deadline = time.monotonic() + BOOT_SECONDS
            with running(launch, directory, DISK, BOOT_SECONDS + FREEZE_SECONDS) as (process, qmp):
                _wait_for_question(directory, deadline)
                qmp.execute("stop")
                write_state(qmp, directory)
                process.wait(FREEZE_SECONDS)
            (directory / machine_logs.SERIAL).rename(directory / CONSOLE)
            # Machines of the template open what it names: nothing that what the build left in the image has written.
            disk.put_over(directory / DISK, image, image, disk_gib)
            complete(directory)
            directory.rename(template.directory)
            return
        except TimeoutError:
            if not boots_left:
                raise
        finally:
            remove_tree(directory)


def _wait_for_question(directory: Path, deadline: float) -> None:
    """Waits until the machine asks for its credentials; raises OSError if it does not, or has ended."""
    with socket.socket(socket.AF_UNIX) as port:
        unix_socket.connect(port, directory / qemu.PORT)
        port.settimeout(LOOK_SECONDS)
        said = None
        while said is None:
            machine_logs.trim_all(directory)  # it has no watchdog, and what install() left runs in it
            if disk.nearly_full(directory):
                raise OSError("the host's disk is nearly full")
            try:
                said = port.recv(1)
            except TimeoutError:
                if time.monotonic() > deadline:
                    problem = "the machine did not ask for its credentials in time"
                    console = read_end(directory / machine_logs.SERIAL, CONSOLE_BYTES).decode(errors="replace")
                    said_last = printable(last_lines(console, CONSOLE_BYTES)) or "nothing"
                    raise TimeoutError(f"{problem}; its console ends with: {said_last}") from None
        if said != bytes([credential_port.WANTS_CREDENTIALS]):
            raise OSError("the machine ended, or asked for something else, before it waited for its credentials")


def write_state(qmp: qemu.QMP, directory: Path) -> None:
    """Writes the devices' state of a stopped machine, whose memory is a file already, and ends its QEMU.

    Args:
        directory: the machine's.
    """
    qmp.execute("migrate-set-capabilities", capabilities=qemu.SHARED_MEMORY_STAYS)
    with (directory / STATE).open("wb") as file:
        qmp.pass_file("state", file.fileno())
        qmp.execute("migrate", uri="fd:state")
        qmp.wait_for_migration(time.monotonic() + FREEZE_SECONDS, lambda: _check_size(file.fileno()))
    qmp.execute("quit")


def _check_size(state: int) -> None:
    if os.fstat(state).st_size > STATE_LIMIT_BYTES:
        raise qemu.QMPError(f"its devices' state takes more than {STATE_LIMIT_BYTES >> 20} MiB")


def complete(directory: Path) -> None:
    """Writes down the size and a hash of each part, so that a damaged one is noticed, and removes sockets and logs."""
    record = {}
    for name in CHECKED:
        with (directory / name).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            record[name] = {"bytes": size, "sha256": _digest(name, file.fileno())}
    (directory / RECORD).write_text(json.dumps(record))
    remove_tree(directory / qemu.RUN)
    for path in directory.iterdir():
        if path.name not in PARTS:
            path.unlink()


def _digest(part: str, file: int) -> str:
    """Returns the hash of a part that is open; empty for a disk that would take too long at each start."""
    too_large = part == DISK and os.fstat(file).st_size > DISK_HASH_BYTES
    return "" if too_large else memory_files.digest_of(file)


@contextlib.contextmanager
def opened(template: Template) -> Iterator[tuple[int, int]]:
    """Opens a template for a machine that resumes from it, and yields descriptors of its memory and its state.

    Raises:
        DamagedError: a part of it is not what it was when the template was made.
        OSError: it cannot be read.
    """
    with contextlib.ExitStack() as stack:
        with _copying(template):  # all of it: meanwhile it may have been made anew
            digests = _digests(template)
            parts = {part: stack.enter_context((template.directory / part).open("rb")) for part in (STATE, DISK)}
            memory = memory_files.opened(template.memory, template.holders, digests[MEMORY])
            stack.callback(os.close, memory)
        for part, file in parts.items():  # other starts need not wait for that
            if _digest(part, file.fileno()) != digests[part]:
                raise memory_files.DamagedError(template.directory / part)
        yield memory, parts[STATE].fileno()


def _digests(template: Template) -> dict[str, str]:
    try:
        record = json.loads((template.directory / RECORD).read_bytes())
        return {name: str(record[name]["sha256"]) for name in CHECKED}
    except (ValueError, LookupError, TypeError):
        raise memory_files.DamagedError(template.directory / RECORD) from None


def _copying(template: Template) -> contextlib.AbstractContextManager[None]:
    """Locks a template. No holder may need longer than a copy of its memory takes."""
    gib = template.memory.stat().st_size >> 30
    return locked(template.lock, wait_seconds=COPY_SECONDS + gib * COPY_SECONDS_PER_GIB, make_parents=False)


def add_holder(template: Template, pid: int, memory: int) -> None:
    """Notes that a machine's watchdog keeps the memory open, for other machines that resume from the template."""
    # The template may be gone, or just be made anew, which does this one no harm.
    with contextlib.suppress(OSError), _copying(template):
        memory_files.add_holder(template.holders, pid, memory)
