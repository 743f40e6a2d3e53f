"""Freezes the machines of an environment at one moment, for copies to resume from. The machines themselves resume too.

What it leaves of each machine is what a template is: memory, devices' state, a layer over the image's disk. The machine
writes all of its state into a second QEMU, which runs nothing and is as confined as any other: its memory is a file, of
which copies share what they do not write. Standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from provisioner.clouds.local.frozen import templates
from provisioner.clouds.local.vm import disk, machine_logs, qemu
from provisioner.store.files import is_locked, locked, read_end, sync, write_atomically

PAUSED_FILE = "paused"
ANSWER_SECONDS = 10.0
# How long QEMU may take to give up what it was writing.
GIVING_UP_SECONDS = 10.0


@contextlib.contextmanager
def held(directory: Path) -> Iterator[qemu.QMP]:
    """Yields a control connection to a running machine, over which it may be paused; it resumes afterwards.

    Args:
        directory: the machine's.

    Raises:
        OSError, qemu.QMPError: QEMU does not answer, or does not resume the machine.
    """
    paused, new = directory / PAUSED_FILE, directory / f"{PAUSED_FILE}.new"
    with locked(new):
        new.rename(paused)  # under this name it was never unlocked
        with qemu.QMP(directory, ANSWER_SECONDS) as qmp:
            try:
                yield qmp
            finally:
                _resume(qmp)
                paused.unlink(missing_ok=True)


def _resume(qmp: qemu.QMP) -> None:
    qmp.execute("migrate_cancel")
    deadline = time.monotonic() + GIVING_UP_SECONDS
    while qmp.status() == "finish-migrate" and time.monotonic() < deadline:
        time.sleep(0.02)
    qmp.execute("cont")


def end_if_abandoned(directory: Path, timeout_seconds: float) -> None:
    """Resumes a machine if the process that paused it has ended without doing so.

    Args:
        directory: the machine's.
        timeout_seconds: how long to wait for each of QEMU's answers.

    Raises:
        OSError, qemu.QMPError: QEMU does not answer, or refuses.
    """
    paused = directory / PAUSED_FILE
    if paused.exists() and not is_locked(paused):
        with qemu.QMP(directory, timeout_seconds) as qmp:
            _resume(qmp)
        paused.unlink(missing_ok=True)


# The second QEMU never reads its disk.
SCRATCH = "scratch.qcow2"
# Memory of 64 GiB at a GiB in two seconds, on a busy host.
SECONDS = 600.0
# More than any machine can write: it stands still meanwhile.
BYTES_PER_SECOND = 1 << 40


@dataclass(frozen=True)
class Subject:
    """A machine that is to be frozen.

    Args:
        directory: the machine's.
        image: the disk of its image.
        launch: how it was started.
        disk_gib: the size of its disk.
        target: a directory that does not exist yet, for the frozen machine's files.
    """

    directory: Path
    image: Path
    launch: qemu.Launch
    disk_gib: int
    target: Path

    @property
    def needed_bytes(self) -> int:
        """What it may take of the host's disk: its memory, and all that was written since the image.

        Raises:
            OSError: the disk that its own is a layer over is gone.
        """
        layers = [self.directory / disk.OVERLAY]
        lower = disk.noted_below(self.directory)
        if lower.resolve() != self.image.resolve():  # copied into the new layer
            layers.append(lower)
        return sum(layer.stat().st_blocks * 512 for layer in layers) + (self.launch.memory_mib << 20)


@dataclass(frozen=True)
class _Receiver:
    """The QEMU that takes a machine's state."""

    subject: Subject
    process: subprocess.Popen[bytes]
    qmp: qemu.QMP
    stream: socket.socket


def freeze(subjects: Sequence[Subject]) -> None:
    """Freezes machines: pauses all, saves them, and resumes all.

    Raises:
        OSError, subprocess.SubprocessError, qemu.QMPError: it failed. The machines resume; what was written stays.
    """
    deadline = time.monotonic() + SECONDS
    for subject in subjects:
        disk.noted_below(subject.directory)  # before any machine stands still for nothing
    with contextlib.ExitStack() as receiving:
        receivers = [receiving.enter_context(_receiver(subject)) for subject in subjects]
        with contextlib.ExitStack() as standing:
            machines = [standing.enter_context(held(subject.directory)) for subject in subjects]
            for machine in machines:
                machine.execute("stop")
            for machine, receiver in zip(machines, receivers, strict=True):
                _send(machine, receiver.stream)
            for machine, receiver in zip(machines, receivers, strict=True):
                machine.wait_for_migration(deadline)
                receiver.qmp.wait_for_migration(deadline)
            for subject in subjects:
                disk.copy(subject.directory / disk.OVERLAY, subject.target / templates.DISK)
        for receiver in receivers:
            templates.write_state(receiver.qmp, receiver.subject.target)
            receiver.process.wait(templates.FREEZE_SECONDS)
    for subject in subjects:
        _complete(subject)


def devices() -> str:
    """Names the devices that machines have today: a hash of QEMU's arguments for one of them.

    A state can be resumed only in a machine that has the same.
    """
    some = qemu.Launch(1, 1, "", "", kvm=False, link=(("own", "peer"),), internet_fd=0, user=None)
    return hashlib.sha256("\0".join(qemu.command(templates.adapted(some))).encode()).hexdigest()[:16]


def identity(image: Path) -> str:
    """Returns what changes if an image's disk becomes another, although it has the same name.

    Raises:
        OSError: it is gone.
    """
    status = image.stat()
    return f"{status.st_size} bytes, written at {status.st_mtime_ns}"


@contextlib.contextmanager
def _receiver(subject: Subject) -> Iterator[_Receiver]:
    subject.target.mkdir(mode=0o700)
    disk.create(subject.target / SCRATCH, None, 1)
    waits = ("-S", "-incoming", "defer")
    ours, theirs = socket.socketpair()
    with (
        ours, theirs,
        templates.running(subject.launch, subject.target, SCRATCH, SECONDS, *waits) as (process, qmp),
    ):  # fmt: skip
        qmp.pass_file("state", theirs.fileno())
        theirs.close()
        qmp.execute("migrate-incoming", uri="fd:state")
        yield _Receiver(subject, process, qmp, ours)


def _send(machine: qemu.QMP, stream: socket.socket) -> None:
    machine.execute("migrate-set-capabilities", capabilities=qemu.ALL_MEMORY_GOES)
    machine.execute("migrate-set-parameters", **{"max-bandwidth": BYTES_PER_SECOND})
    machine.pass_file("receiver", stream.fileno())
    stream.close()
    machine.execute("migrate", uri="fd:receiver")


def _complete(subject: Subject) -> None:
    """Completes the files of a frozen machine, and flushes them to the host's disk."""
    lower = disk.noted_below(subject.directory)
    disk.put_over(subject.target / templates.DISK, lower, subject.image, subject.disk_gib)
    console = read_end(subject.directory / machine_logs.SERIAL, machine_logs.LIMIT_BYTES)
    write_atomically(subject.target / templates.CONSOLE, console)
    templates.complete(subject.target)
    for path in (*subject.target.iterdir(), subject.target):
        sync(path)
