"""Starts and ends one local machine, for terraform/local's provisioners. Standard library only, for a quick start.

Usage: python -m provisioner.clouds.local.machine start|destroy

PROVISIONER_MACHINE_DIRECTORY names the machine's directory; PROVISIONER_MACHINE (start) holds its settings as JSON, as
the Terraform module takes them. The directory's `credentials/` holds what the machine is told, `accelerator` says kvm
or tcg, and with `wants_template` it resumes from its image's template. `snapshot` names the directory of a frozen
machine that it resumes from instead. The controller wrote these there, so no key passes through Terraform.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any

from provisioner.base.printable import last_lines
from provisioner.base.progress import NOTE_OF_A_PROGRAM
from provisioner.clouds.local.frozen import memory_files, templates
from provisioner.clouds.local.network import captures, egress
from provisioner.clouds.local.network.egress import start_program
from provisioner.clouds.local.vm import bubblewrap, confinement, credential_port, disk, machine_logs, qemu, shutdown
from provisioner.clouds.local.vm.processes import own_user
from provisioner.store.files import locked, openers, read_end, remove_tree

# QEMU opens its control socket in well under a second; on a busy host it may take longer.
QMP_SECONDS = 60
QUIT_SECONDS = 5
# A machine takes its credentials within a second; many that start at once on a busy host may take longer.
TAKE_SECONDS = 120
# Written by the controller: the machine starts from its image's template if there can be one.
WANTS_TEMPLATE = "wants_template"
# Written by the controller: the directory of the frozen machine that it resumes from.
SNAPSHOT = "snapshot"
# Written here: how the machine started, and why not from a template if it should have.
ORIGIN = "origin"
TEMPLATE, BOOT, COPY = "template", "boot", "snapshot"
ORIGIN_CHARACTERS = 500
# QEMU keeps this file open as long as it lives.
OPEN_FILE = "qemu.open"
# Written by the controller: the roles of the environment's other machines.
PEERS = "peers"


class MachineError(Exception):
    """An operation failed. The message is one line, which Terraform shows to the operator."""


def main() -> int:
    """Runs one operation. Errors go to stderr, notes to stdout, from where Terraform reports them."""
    operation = sys.argv[1] if len(sys.argv) == 2 else ""
    operations: dict[str, Callable[[Path], None]] = {"start": _start, "destroy": destroy}
    if operation not in operations:
        print(__doc__, file=sys.stderr)
        return 2
    directory = Path(os.environ["PROVISIONER_MACHINE_DIRECTORY"])
    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a machine's memory belongs into no file
    try:
        operations[operation](directory)
    except (MachineError, qemu.QMPError, OSError, subprocess.SubprocessError) as error:
        print(f"{directory.name} machine: {operation} failed: {error}", file=sys.stderr)
        return 1
    return 0


def _locked(directory: Path) -> contextlib.AbstractContextManager[None]:
    """Holds the machine's lock, so that a late start cannot slip behind a destroy."""
    return locked(directory.with_name(f"{directory.name}.lock"), make_parents=False)


def _start(directory: Path) -> None:
    """Starts QEMU and writes endpoint.json. A machine that already runs is left as it is."""
    settings = json.loads(os.environ["PROVISIONER_MACHINE"])
    image = Path(settings["image"])
    launch = described(directory, settings)
    template, origin = None, BOOT
    frozen = _snapshot(directory, launch)
    if frozen is None and (directory / WANTS_TEMPLATE).exists() and qemu.live_pid(directory / qemu.PIDFILE) is None:
        try:  # without the lock: it may take as long as a boot, and a destroy must not wait for it
            template, origin = templates.obtain(image, launch, _note), TEMPLATE
        except templates.TemplateError as error:
            origin = f"{BOOT}: {error}"
    with _locked(directory):
        if not (directory / credential_port.CREDENTIALS).is_dir():
            raise MachineError("it has no credentials: it was destroyed, or the controller never prepared it")
        os.chdir(directory)
        credentials = Path(credential_port.CREDENTIALS)
        if qemu.live_pid(Path(qemu.PIDFILE)) is None or not Path(ORIGIN).exists():
            _end_all(Path())  # a start that was cut short may have left a machine that does not run
            Path(ORIGIN).unlink(missing_ok=True)
            remove_tree(Path(qemu.RUN))  # with what an earlier QEMU may have left there
            Path(qemu.RUN).mkdir(mode=0o700)
            # What the controller does not say: its own key as root's, and the machine's id.
            (credentials / "authorized_keys.root").write_text(settings["public_key"].strip() + "\n")
            (credentials / "machine_id").write_text(uuid.uuid4().hex + "\n")
            if frozen:
                origin = COPY
                _resume(settings, launch, frozen)
            elif template:
                origin = _start_from_template(settings, launch, template)
            if origin not in (TEMPLATE, COPY):
                _launch(settings, launch, image)
            Path(ORIGIN).write_text(" ".join(origin.split())[:ORIGIN_CHARACTERS])
        address = ""
        with contextlib.suppress(FileNotFoundError):  # it is alone in its environment
            address = (credentials / "private_address").read_text().split("/")[0]
        endpoint = {
            "host": confinement.GUEST_ADDRESS,
            "port": 22,
            "pidfile": qemu.PIDFILE,
            "private_address": address or None,
            "origin": Path(ORIGIN).read_text(),
        }
        Path("endpoint.json.new").write_text(json.dumps(endpoint))
        Path("endpoint.json.new").rename("endpoint.json")


def _note(text: str) -> None:
    """Tells the operator something, by way of Terraform."""
    print(f"{NOTE_OF_A_PROGRAM}{text}", flush=True)


def _snapshot(directory: Path, launch: qemu.Launch) -> templates.Template | None:
    """Returns the frozen machine that this one resumes from, if it is whole and ours; None if it boots."""
    try:
        frozen = templates.Template(Path((directory / SNAPSHOT).read_text()))
    except FileNotFoundError:
        return None
    if not templates.usable(frozen, launch):
        raise MachineError("the frozen machine that it copies is missing, damaged, or owned by another user")
    return frozen


def described(directory: Path, settings: Mapping[str, Any]) -> qemu.Launch:
    """Says how a machine starts; the descriptor of its internet card is still to be opened.

    Args:
        directory: the machine's.
        settings: as the Terraform module takes them.
    """
    image = Path(settings["image"])
    return qemu.Launch(
        cpus=int(settings["cpus"]),
        memory_mib=int(settings["memory_gib"] * 1024),
        kernel=str(image.with_name("vmlinuz")),
        initrd=str(image.with_name("initrd.img")),
        kvm=(directory / "accelerator").read_text() == "kvm",
        link=qemu.link_sockets(directory.name, (directory / PEERS).read_text().split()),
        internet_fd=-1 if settings["full_internet"] or settings["allowed_destinations"] else None,
        user=own_user(directory.parent),
        capture=(directory / captures.WANTED).exists(),
    )


def _start_from_template(settings: dict[str, Any], launch: qemu.Launch, template: templates.Template) -> str:
    """Starts the machine from a template, or discards one that does not serve; returns its origin."""
    taken, prepared = Path(credential_port.TAKEN), Path(credential_port.CREDENTIALS).is_dir
    try:
        _resume(settings, launch, template)
        _wait(lambda: taken.exists() or qemu.live_pid(Path(qemu.PIDFILE)) is None or not prepared(), TAKE_SECONDS)
        if not taken.exists():
            raise MachineError("the machine did not take its credentials")
    except (MachineError, OSError, subprocess.SubprocessError, qemu.QMPError) as error:
        at_fault = Path(OPEN_FILE).exists() or isinstance(error, memory_files.DamagedError)
        _end_all(Path())
        if not prepared():
            raise MachineError("it was destroyed while it started") from error
        if not at_fault:  # the host has no memory for it, or another process has removed it
            return f"{BOOT}: the template could not be used: {error}"
        templates.discard(template)
        return f"{BOOT}: the template did not work and was deleted: {error}"
    return TEMPLATE


def _running_qemu() -> qemu.QMP:
    return qemu.wait_for_qmp(lambda: qemu.live_pid(Path(qemu.PIDFILE)) is not None, time.monotonic() + QMP_SECONDS)


def _resume(settings: dict[str, Any], launch: qemu.Launch, template: templates.Template) -> None:
    """Starts QEMU with the state of a frozen machine, which resumes."""
    with templates.opened(template) as (memory, state):
        shutil.copyfile(template.directory / templates.CONSOLE, machine_logs.SERIAL)  # the new console continues it
        frozen = replace(launch, memory=f"/proc/self/fd/{memory}", frozen=True)
        watchdog = _launch(settings, frozen, template.disk, (memory, state))
        templates.add_holder(template, watchdog, memory)
        with _running_qemu() as qmp:
            qmp.execute("migrate-set-capabilities", capabilities=qemu.SHARED_MEMORY_STAYS)
            qmp.execute("migrate-incoming", uri=f"fd:{state}")
            qmp.wait_for_migration(time.monotonic() + QMP_SECONDS)
            qmp.execute("cont")
            qmp.execute("block_resize", device="disk", size=int(settings["disk_gib"]) << 30)


def _launch(settings: dict[str, Any], launch: qemu.Launch, lower: Path, files: tuple[int, ...] = ()) -> int:
    """Starts QEMU over a lower disk, with its watchdog, whose pid it returns, and with the egress proxy if the machine
    may reach anything. The watchdog keeps the files open, too."""
    allowed: list[dict[str, Any]] = settings["allowed_destinations"]
    internet: socket.socket | None = None
    kept = files
    if launch.internet_fd is not None:
        internet, theirs = socket.socketpair()
        with theirs:
            egress.start(theirs, None if settings["full_internet"] else allowed, egress.opened(Path()))
        launch = replace(launch, internet_fd=internet.fileno())
        files = (*files, internet.fileno())
    disk.create(Path(disk.OVERLAY), lower, None if launch.frozen else int(settings["disk_gib"]))
    disk.note_below(Path(), lower)
    Path(qemu.LINKS).mkdir(mode=0o700, exist_ok=True)
    shutdown.prepare(Path())
    Path(credential_port.TAKEN).unlink(missing_ok=True)
    # Before QEMU: the machine must never run without its watchdog.
    watchdog = start_program("provisioner.clouds.local.watchdog", pass_fds=kept)
    # Not -daemonize: that changes to /, and the private link's relative paths are resolved at every packet.
    # QEMU takes a moment to lock its pidfile. Until then, the file that it inherits leads to it.
    with (
        Path("qemu.log").open("ab") as log,
        Path(OPEN_FILE).open("wb") as inherited,
        confinement.place_for_card() as card,
        disk.opened(Path(disk.OVERLAY)) as layer,
    ):
        if launch.frozen and not Path(credential_port.CREDENTIALS).is_dir():
            raise MachineError("it was destroyed while it started")
        launch = replace(launch, disk_fds=layer, management_fd=card.fileno())
        process, pid = _start_qemu(launch, lower, log, (inherited.fileno(), *layer, *files))
    if internet:
        internet.close()
    if launch.user:
        _admit(launch.user.gid, Path(qemu.LINKS))
    try:
        qemu.wait_for_qmp(lambda: process.poll() is None, time.monotonic() + QMP_SECONDS).__exit__()
    except qemu.QMPError as error:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        said = read_end(Path("qemu.log"), 2000).decode(errors="replace")
        raise MachineError(f"QEMU did not start: {said}") from error
    if launch.user:
        _admit(launch.user.gid, *(Path(own) for own, _ in launch.link))
    return watchdog


def _start_qemu(
    launch: qemu.Launch, lower: Path, log: IO[bytes], pass_fds: Sequence[int]
) -> tuple[subprocess.Popen[bytes], int]:
    """Starts QEMU, enclosed, in a network namespace of its own, in which the machine's management card ends.

    Only users that may enter the namespace reach the machine. And if the machine takes QEMU over, QEMU has no network.

    Returns:
        The process that waits for QEMU's end, and QEMU's pid.
    """
    card = launch.management_fd
    own = [Path(qemu.RUN), *([Path(qemu.LINKS)] if launch.link else [])]
    try:
        process, pid = bubblewrap.start(
            qemu.enclosed(launch, own, disk.chain(lower)), qemu.command(launch), (card, *pass_fds),
            stdout=log, stderr=log, preexec_fn=partial(_prepare_to_become_qemu, card),
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        said = last_lines(read_end(Path("qemu.log"), 200).decode(errors="replace"), 200)
        raise MachineError(
            "QEMU gets no network or no file system of its own, or its directory cannot be written; `provisioner "
            f"doctor` says what is missing. {said}"
        ) from error
    qemu.note_process(pid)
    return process, pid


def _prepare_to_become_qemu(card: int) -> None:
    """Runs in the process that leads to QEMU: if the controller is killed now, no QEMU runs that was not noted."""
    qemu.note_process(os.getpid())
    try:
        confinement.leave_network()
        confinement.make_card(card)
    except OSError as error:
        os.write(2, f"{error}\n".encode())  # qemu.log
        raise


def _admit(group: int, *paths: Path) -> None:
    """Lets the environment's QEMUs, which are not root, enter directories and send to sockets. No other user may."""
    for path in paths:
        os.chown(path, -1, group)
        path.chmod(0o710 if path.is_dir() else 0o620)


def destroy(directory: Path) -> None:
    """Ends the machine and removes its directory. Safe to repeat, and at any moment while it starts.

    Raises:
        MachineError: one of its processes would not end.
    """
    if not directory.is_dir():
        return
    # A start has the lock until its machine has resumed. Without credentials and QEMU it gives up.
    shutil.rmtree(directory / credential_port.CREDENTIALS, ignore_errors=True)
    with contextlib.suppress(MachineError, OSError):
        _end_all(directory)
    with _locked(directory):
        _end_all(directory)
        shutil.rmtree(directory)


def _end_all(directory: Path) -> None:
    """Ends QEMU and the egress proxy: each of them even if another does not end, which it then raises."""
    errors: list[MachineError | OSError] = []
    for find in (
        lambda: qemu.live_pid(directory / qemu.PIDFILE),
        lambda: egress.pid_of(directory),
        lambda: next(iter(openers(directory / OPEN_FILE)), None),
    ):
        try:
            end(find)
        except (MachineError, OSError) as error:
            errors.append(error)
    for each in errors:
        raise each


def end(find: Callable[[], int | None]) -> None:
    """Asks a process to end, then kills it.

    Args:
        find: returns the process's pid, None once it has ended.

    Raises:
        MachineError: it did not end, or cannot be told.
    """
    for sent in (signal.SIGTERM, signal.SIGKILL):
        if (pid := find()) is None:
            return
        if pid <= 1:
            raise MachineError("a process of the machine lives, and cannot be told")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, sent)
        _wait(lambda: find() is None, QUIT_SECONDS)
    if (pid := find()) is not None:
        raise MachineError(f"process {pid} does not end")


def _wait(done: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main())
