"""Starts and ends one local machine, for terraform/local's provisioners. Standard library only, for a quick start.

Usage: python -m provisioner.clouds.local.machine prepare|start|destroy

PROVISIONER_MACHINE_DIRECTORY names the machine's directory; PROVISIONER_MACHINE (prepare, start) holds its
settings as JSON, as the Terraform module takes them. The directory's `credentials/` holds what the machine boots with,
and `accelerator` says kvm or tcg. The controller wrote both there, so no key passes through Terraform.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from provisioner import child_environment
from provisioner.clouds.local import confinement, qemu, shutdown
from provisioner.clouds.local.users import own_user
from provisioner.store.files import read_end
from provisioner.store.locks import holders

# QEMU opens its control socket in well under a second; on a busy host it may take longer.
QMP_SECONDS = 60
QUIT_SECONDS = 5
# QEMU keeps this file open as long as it lives.
OPEN_FILE = "qemu.open"
PEERS = {"primary": "aux", "aux": "primary"}
# The egress proxy counts there (egress_counters.py).
EGRESS_COUNTERS = "network.counters"


class MachineError(Exception):
    """An operation failed. The message is one line, which Terraform shows to the operator."""


def main() -> int:
    """Runs one operation. Errors go to stderr, from where Terraform reports them."""
    operation = sys.argv[1] if len(sys.argv) == 2 else ""
    operations: dict[str, Callable[[Path], None]] = {"prepare": _prepare, "start": _start, "destroy": destroy}
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


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Holds the machine's lock, so that a late start cannot slip behind a destroy."""
    with (directory.parent / f"{directory.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _settings() -> dict[str, Any]:
    settings: dict[str, Any] = json.loads(os.environ["PROVISIONER_MACHINE"])
    return settings


def _prepare(directory: Path) -> None:
    """Creates the machine's disk: a copy-on-write layer over its image."""
    settings = _settings()
    with _locked(directory):
        if not (directory / "credentials").is_dir():
            raise MachineError("it has no credentials: it was destroyed, or the controller never prepared it")
        image = Path(settings["image"])
        backing_format = "raw" if image.suffix == ".raw" else "qcow2"
        subprocess.run(
            ["qemu-img", "create", "-q", "-f", "qcow2", "-b", str(image), "-F", backing_format, "disk.qcow2",
             f"{settings['disk_gib']}G"],
            cwd=directory, check=True, stdin=subprocess.DEVNULL, env=child_environment.for_program(os.environ),
        )  # fmt: skip


def _start(directory: Path) -> None:
    """Starts QEMU and writes endpoint.json. A machine that already runs is left as it is."""
    settings = _settings()
    with _locked(directory):
        if not (directory / "disk.qcow2").exists():
            raise MachineError("its disk is gone: it was destroyed in the meantime")
        os.chdir(directory)
        if qemu.live_pid(Path("qemu.pid")) is None:
            _launch(directory, settings)
        with qemu.wait_for_qmp(lambda: True, time.monotonic() + QMP_SECONDS) as qmp:
            usernet = qmp.monitor("info usernet")
        endpoint = {
            "host": "127.0.0.1",
            "port": qemu.forwarded_port(usernet),
            "pidfile": "qemu.pid",
            "private_address": _private_address(),
        }
        temporary = Path("endpoint.json.new")
        temporary.write_text(json.dumps(endpoint))
        temporary.rename("endpoint.json")


def _private_address() -> str | None:
    try:
        return Path("credentials/private_address").read_text().split("/")[0]
    except FileNotFoundError:
        return None  # it is alone in its environment


def _launch(directory: Path, settings: dict[str, Any]) -> None:
    """Starts QEMU, its watchdog, and the egress proxy if the machine may reach anything."""
    allowed: list[dict[str, Any]] = settings["allowed_destinations"]
    internet: socket.socket | None = None
    if settings["full_internet"] or allowed:
        internet, theirs = socket.socketpair()
        with theirs:
            _start_network(theirs, None if settings["full_internet"] else allowed)
    peer = PEERS[directory.name]
    image = Path(settings["image"])
    user = own_user(directory.parent)
    launch = qemu.Launch(
        cpus=int(settings["cpus"]),
        memory_mib=int(settings["memory_gib"] * 1024),
        kernel=str(image.with_name("vmlinuz")),
        initrd=str(image.with_name("initrd.img")),
        machine_id=uuid.uuid4().hex,
        kvm=Path("accelerator").read_text() == "kvm",
        link=link_sockets(directory.name) if Path(f"../{peer}").is_dir() else None,
        internet_fd=internet.fileno() if internet else None,
        credentials=_smbios_strings(settings["public_key"]),
        user=user,
    )
    shutdown.prepare(Path())
    # Before QEMU: the machine must never run without its watchdog.
    _start_program("provisioner.clouds.local.watchdog")
    # Not -daemonize: that changes to /, and the private link's relative paths are resolved at every packet.
    # QEMU takes a moment to lock its pidfile. Until then, the file that it inherits leads to it.
    with Path("qemu.log").open("ab") as log, Path(OPEN_FILE).open("wb") as inherited:
        pass_fds = [inherited.fileno(), *([internet.fileno()] if internet else [])]
        process = _start_qemu(qemu.command(launch), log, pass_fds)
    if internet:
        internet.close()
    if user:
        _admit(user.gid, Path(".."), Path())
    try:
        qemu.wait_for_qmp(lambda: process.poll() is None, time.monotonic() + QMP_SECONDS).__exit__()
    except qemu.QMPError as error:
        process.kill()
        said = read_end(Path("qemu.log"), 2000).decode(errors="replace")
        raise MachineError(f"QEMU did not start: {said}") from error
    if user and launch.link:
        _admit(user.gid, Path(launch.link[0]))


def _start_qemu(argv: list[str], log: IO[bytes], pass_fds: list[int]) -> subprocess.Popen[bytes]:
    """Starts QEMU in a network namespace of its own.

    No user of the host reaches the forwarded port, but who may enter the namespace; and QEMU itself, should the machine
    take it over, has no network.
    """
    try:
        return subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, pass_fds=pass_fds,
            env=child_environment.for_program(os.environ), preexec_fn=confinement.leave_network,
        )  # fmt: skip
    except subprocess.SubprocessError as error:
        raise MachineError("QEMU gets no network namespace; `provisioner doctor` says what is missing") from error


def _admit(group: int, *paths: Path) -> None:
    """Lets the environment's QEMUs, which are not root, enter directories and send to sockets. Nobody else may."""
    for path in paths:
        os.chown(path, -1, group)
        path.chmod(0o710 if path.is_dir() else 0o620)


def link_sockets(role: str) -> tuple[str, str]:
    """Returns a machine's own socket of the private link and its peer's, relative to the machine's directory."""
    return "link.sock", f"../{PEERS[role]}/link.sock"


def _smbios_strings(public_key: str) -> tuple[str, ...]:
    """Writes each credential as an SMBIOS string for systemd to import, and returns the files' names."""
    Path("credentials/authorized_keys.root").write_text(public_key.strip() + "\n")
    Path("smbios").mkdir(mode=0o700, exist_ok=True)
    names = []
    for credential in sorted(Path("credentials").iterdir()):
        value = base64.b64encode(credential.read_bytes()).decode()
        name = f"smbios/{credential.name}"
        Path(name).write_text(f"io.systemd.credential.binary:provisioner.{credential.name}={value}")
        names.append(name)
    return tuple(names)


def _start_network(theirs: socket.socket, allowed: list[dict[str, Any]] | None) -> None:
    """Starts the egress proxy on one end of a socket pair; `allowed` None means the whole internet.

    It ends when QEMU closes the other end. Its pid is kept for `destroy` all the same.
    """
    arguments = ["--fd", str(theirs.fileno()), "--log", "network.log", "--counters", EGRESS_COUNTERS]
    if allowed is None:
        arguments.append("--full-internet")
    for destination in allowed or ():
        arguments += ["--allow", f"{destination['cidr']}:{destination['port']}"]
    pid = _start_program("provisioner.clouds.local.egress_proxy", *arguments, pass_fds=(theirs.fileno(),))
    Path("network.json").write_text(json.dumps({"pid": pid, "started": _start_time(pid)}))


def _start_program(module: str, *arguments: str, pass_fds: tuple[int, ...] = ()) -> int:
    """Starts one of our programs in the machine's directory, to outlive this one, and returns its pid."""
    argv = [sys.executable, "-m", module, *arguments]
    null = subprocess.DEVNULL
    return subprocess.Popen(
        argv, stdin=null, stdout=null, stderr=null, start_new_session=True, pass_fds=pass_fds,
        env=child_environment.for_python(os.environ),
    ).pid  # fmt: skip


def _start_time(pid: int) -> str | None:
    """The process's start time in clock ticks: with the pid it identifies a process (proc(5), stat field 22)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


def network_pid(directory: Path) -> int | None:
    """Returns the pid of the machine's egress proxy; None if it has ended."""
    try:
        process = json.loads((directory / "network.json").read_text())
        state = Path(f"/proc/{process['pid']}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, ValueError):
        return None
    if state == "Z" or _start_time(process["pid"]) != process["started"]:
        return None
    return int(process["pid"])


def destroy(directory: Path) -> None:
    """Ends the machine and removes its directory. Safe to repeat, and at any moment while it starts.

    Raises:
        MachineError: one of its processes would not end.
    """
    if not directory.is_dir():
        return
    with _locked(directory):
        end(lambda: qemu.live_pid(directory / "qemu.pid"))
        end(lambda: network_pid(directory))
        end(lambda: next(iter(holders(directory / OPEN_FILE)), None))
        shutil.rmtree(directory)


def end(find: Callable[[], int | None]) -> None:
    """Asks a process to end, then kills it.

    Args:
        find: returns the process's pid, None once it has ended.

    Raises:
        MachineError: it did not end.
    """
    for sent in (signal.SIGTERM, signal.SIGKILL):
        if (pid := find()) is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, sent)
        _wait(lambda: find() is None)
    if (pid := find()) is not None:
        raise MachineError(f"process {pid} does not end")


def _wait(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + QUIT_SECONDS
    while not done() and time.monotonic() < deadline:
        time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main())
