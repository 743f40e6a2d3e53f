"""QEMU's command line (pure), its pidfile and its QMP socket. Standard library only: Terraform starts it.

Never starts a process itself; clouds/local/machine.py does.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from provisioner.base import unix_socket
from provisioner.base.printable import encodable
from provisioner.clouds.local.vm import bubblewrap, machine_logs, shutdown
from provisioner.clouds.local.vm.confinement import GUEST_MAC
from provisioner.clouds.local.vm.processes import User, is_alive, start_time
from provisioner.store.files import holders, open_plain

PRIVATE_MAC = "52:54:00:00:00:02"
INTERNET_MAC = "52:54:00:00:00:03"
PRIMARY = "primary"
# No machine has a name with a dot.
LINKS = "../.link"
# Of a packet. The cards offer no offloading, so none is longer than Ethernet's frames.
CAPTURED_BYTES = 2048

# A machine's sockets of the private link, each with the path of its other end.
Link = tuple[tuple[str, str], ...]


def link_sockets(role: str, peers: Sequence[str]) -> Link:
    """Returns a machine's sockets of the private link, each with its other end, relative to the machine's directory.

    They lie in a directory beside the machines', all that a QEMU sees of the other machines.

    Two machines send to each other. Where there are more, each sends to the primary machine's QEMU, which passes on
    what it gets from one to all others, and so is the link's hub.

    Args:
        peers: the roles of the environment's other machines.
    """
    if len(peers) < 2:
        return tuple((f"{LINKS}/{role}.sock", f"{LINKS}/{peer}.sock") for peer in peers)
    if role != PRIMARY:
        return ((f"{LINKS}/{role}.sock", f"{LINKS}/{PRIMARY}.{role}.sock"),)
    return tuple((f"{LINKS}/{PRIMARY}.{peer}.sock", f"{LINKS}/{peer}.sock") for peer in sorted(peers))


def network(link: Link, management_fd: int, internet_fd: int | None) -> list[str]:
    """Returns the arguments that give a machine its cards, and each card the one place that it leads to.

    QEMU passes frames on. None of its own network stacks is among them.

    Args:
        link, management_fd, internet_fd: as in Launch.
    """
    argv = ["-netdev", f"tap,id=management,fd={management_fd}", "-device", _card("management", GUEST_MAC)]
    for name, (own, peer) in zip(link_names(link), link, strict=True):
        argv += ["-netdev", f"dgram,id={name},local.type=unix,local.path={own},remote.type=unix,remote.path={peer}"]
        if len(link) > 1:
            argv += ["-netdev", f"hubport,id=hub-{name},hubid=0,netdev={name}"]
    if len(link) > 1:
        argv += ["-netdev", "hubport,id=link,hubid=0"]
    if link:
        argv += ["-device", _card("link", PRIVATE_MAC)]
    if internet_fd is not None:
        argv += ["-netdev", f"stream,id=internet,server=off,addr.type=fd,addr.str={internet_fd}"]
        argv += ["-device", _card("internet", INTERNET_MAC)]
    return argv


def captured(link: Link, internet_fd: int | None) -> list[str]:
    """Returns the arguments that have QEMU write what the cards carry to files, but for the management card's SSH.

    Args:
        link, internet_fd: as in Launch.
    """
    cards = [*(["link"] if link else ()), *(["internet"] if internet_fd is not None else ())]
    argv = []
    for card in cards:
        file = f"file={RUN}/{card}.pcap,maxlen={CAPTURED_BYTES}"
        argv += ["-object", f"filter-dump,id={capture_name(card)},netdev={card},{file}"]
    return argv


def capture_name(card: str) -> str:
    """Returns QEMU's name for the capture of a card."""
    return f"capture-{card}"


def link_names(link: Link) -> list[str]:
    """Returns how QEMU names each socket of the private link."""
    return ["link"] if len(link) == 1 else [f"link{number}" for number in range(len(link))]


def _card(netdev: str, mac: str) -> str:
    return f"virtio-net-pci,netdev={netdev},mac={mac},romfile="


PROGRAM = "qemu-system-x86_64"

# What a machine has no use for is off: system management mode, VMware's port, SATA, SMBus, keyboard and mouse.
BOARD = "q35,smm=off,vmport=off,sata=off,smbus=off,i8042=off"

# No machine runs machines of its own: nested KVM is the part of KVM with the most known ways out, such as
# CVE-2026-53359 and CVE-2026-64561 (cve.org).
KVM_CPU = "host,vmx=off,svm=off"
# Emulated, `max` boots a third slower than a named model; NumPy's wheels need x86-64-v2. With the
# instructions for AES, ciphers are three times as fast.
EMULATED_CPU = "Nehalem,+aes"
# An emulated CPU does not speculate and is slow at testing ciphers; on a busy host a kernel finds its timer broken and
# stops ("IO-APIC + timer doesn't work"). Linux' kernel-parameters.txt.
EMULATED_BOOT = " mitigations=off cryptomgr.notests no_timer_check"
# What QEMU may keep of translated code. By default it is a gigabyte, of which a short task fills 200 MiB; with half of
# this, machines need a fifth more CPU time, as they translate again what was thrown away.
TRANSLATED_CODE_MIB = 128

# QEMU's own name of a machine's memory on this kind of board: whether or not it is a file, its state is the same.
MEMORY = "pc.ram"
# QMP's capabilities for a migration in which memory that is a file stays where it is, and for one in which all goes.
SHARED_MEMORY_STAYS = [{"capability": "x-ignore-shared", "state": True}]
ALL_MEMORY_GOES = [{"capability": "x-ignore-shared", "state": False}]
# In the machine's directory: all that QEMU may write by name.
RUN = "run"
PIDFILE, CONTROL = f"{RUN}/qemu.pid", f"{RUN}/qmp.sock"
# The socket of the machine's end of its virtio-serial port.
PORT = f"{RUN}/credentials.sock"
# In the machine's directory: number and start time of the process that became QEMU.
PROCESS = "qemu.process"
# For each answer about a machine's status: QEMU serves one client at a time, and another may be at work.
STATUS_SECONDS = 5.0
# No other reason exists for this status: other errors are the guest's to handle (-drive, rerror and werror).
FULL_DISK = "io-error"

# A machine that took QEMU over answers what it likes.
LINE_BYTES = 1 << 20
MESSAGE_CHARACTERS = 500
MOST_OF_A_VERSION = 1000
# What stands for the pid of a process that lives and cannot be told; no process has it.
UNTOLD = -1
SANDBOX = "on,obsolete=deny,spawn=deny,resourcecontrol=deny,elevateprivileges="


@dataclass(frozen=True)
class Launch:
    """Everything that QEMU's command line depends on. File names are relative to the machine's directory.

    Args:
        cpus: virtual CPUs.
        memory_mib: memory in MiB.
        kernel, initrd: absolute paths.
        kvm: whether KVM works on this host.
        link: its sockets of the private link; none for a machine that is alone. With more than one, this QEMU is the
            link's hub.
        internet_fd: file descriptor connected to the egress proxy, or None if the machine may reach nothing outside.
        management_fd: file descriptor of the other end of the management card (confinement.make_card).
        user: the user that QEMU becomes once it has opened its files; None for the one that starts it.
        disk_fds: descriptors of the machine's disk, one to read and write, one to read only.
        memory: file that is the machine's memory; None for memory of its own.
        frozen: whether the file holds a frozen machine's memory, from which this one resumes without changing the file.
        capture: whether what the link and the internet card carry is written to files (network/captures.py).
    """

    cpus: int
    memory_mib: int
    kernel: str
    initrd: str
    kvm: bool
    link: Link
    internet_fd: int | None
    user: User | None
    disk_fds: tuple[int, ...] = ()
    memory: str | None = None
    frozen: bool = False
    capture: bool = False
    management_fd: int = -1


def command(launch: Launch) -> list[str]:
    """Returns QEMU's argument list for one machine."""
    accelerator = "kvm" if launch.kvm else f"tcg,tb-size={TRANSLATED_CODE_MIB}"
    boot = "root=/dev/vda rw console=ttyS0 net.ifnames=0"
    board = BOARD
    if launch.kvm:
        board += ",hpet=off"  # the guest has KVM's clock
    else:
        boot += EMULATED_BOOT
    if launch.memory:
        board += f",memory-backend={MEMORY}"
    argv = [
        PROGRAM,
        *("-nodefaults", "-no-user-config", "-display", "none"),
        *("-accel", accelerator),
        *("-machine", board, "-global", "apic-common.vapic=off"),
        *("-cpu", KVM_CPU if launch.kvm else EMULATED_CPU),
        *("-smp", str(launch.cpus), "-m", f"{launch.memory_mib}M"),
        *("-kernel", launch.kernel, "-initrd", launch.initrd, "-append", boot),
        # An environment's disk is thrown away, so nothing need wait until the host's disk has it safe.
        # A machine that is frozen, or resumes, opens its disk again when it may no longer open any file by name.
        *itertools.chain.from_iterable(("-add-fd", f"fd={descriptor},set=1") for descriptor in launch.disk_fds),
        # Nor could it open it again to write if it locked it: the lock of the one descriptor keeps the other out.
        *("-drive", "file=/dev/fdset/1,file.locking=off,format=qcow2,if=none,id=disk,cache=unsafe,discard=unmap"),
        *("-device", "virtio-blk-pci,drive=disk"),
        *("-object", "rng-random,filename=/dev/urandom,id=rng", "-device", "virtio-rng-pci,rng=rng"),
        # Another id at each start: the kernel of a resumed copy then draws new keys.
        *("-device", "vmgenid,guid=auto"),
        # Appending, so that the watchdog can shorten the file.
        *("-chardev", f"file,id=serial,path={machine_logs.SERIAL},append=on", "-serial", "chardev:serial"),
        *("-pidfile", PIDFILE),
        *("-qmp", f"unix:{CONTROL},server=on,wait=off"),
        *confined(launch.user),
        *shutdown.ARGUMENTS,
        # The machine asks there for its credentials.
        *("-device", "virtio-serial-pci", "-chardev", f"socket,id=credentials,path={PORT},server=on,wait=off"),
        *("-device", "virtserialport,chardev=credentials,name=provisioner"),
        *network(launch.link, launch.management_fd, launch.internet_fd),
    ]
    if launch.capture:
        argv += captured(launch.link, launch.internet_fd)
    if launch.memory:
        # A resumed machine keeps the pages that it writes to itself.
        file = f"size={launch.memory_mib}M,mem-path={launch.memory},share={'off' if launch.frozen else 'on'}"
        argv += ["-object", f"memory-backend-file,id={MEMORY},{file}"]
    if launch.frozen:
        argv += ["-S", "-incoming", "defer"]
    return argv


def enclosed(launch: Launch, own: Iterable[Path], disks: Iterable[Path], *options: str) -> list[str]:
    """Returns the prefix that gives QEMU a file system of its own.

    Args:
        launch: how the machine starts.
        own: what it may write by name.
        disks: those that its own is a layer over (disk.chain).
        options: of bubblewrap's.
    """
    return bubblewrap.command(
        PROGRAM,
        readable=[Path(launch.kernel), Path(launch.initrd), *disks],
        writable=own,
        devices=["urandom", *(["kvm"] if launch.kvm else [])],
        capabilities=bubblewrap.BECOMES_ANOTHER_USER,
        options=[*bubblewrap.PROCESSES, *options],
    )


def confined(user: User | None) -> list[str]:
    """Returns the arguments that take away from QEMU what it does not need while it runs.

    Args:
        user: the user to become. QEMU's sandbox would forbid that change; without capabilities, and with
            no_new_privs, which the sandbox sets, there is none back.
    """
    if user is None:
        return ["-sandbox", f"{SANDBOX}deny"]
    return ["-sandbox", f"{SANDBOX}allow", "-runas", f"{user.uid}:{user.gid}"]


def note_process(pid: int) -> None:
    """Notes QEMU's process in the machine's directory, this process's working directory.

    Raises:
        OSError: the note cannot be written.
    """
    Path(PROCESS).write_text(f"{pid} {start_time(pid)}")


def live_pid(pidfile: Path) -> int | None:
    """Returns the pid of a machine's QEMU, or None; UNTOLD if it is not known which process holds `pidfile`.

    QEMU lives if a process holds the lock on the pidfile, or if the process that was noted in the machine's directory
    lives. QEMU keeps that lock until it ends, but a machine that has taken QEMU over may give it up. A reused pid
    misleads neither.
    """
    holder = _lock_holder(pidfile)
    if holder not in (None, UNTOLD):
        return holder
    return _noted_pid(pidfile.parent.with_name(PROCESS)) or holder


def _noted_pid(note: Path) -> int | None:
    try:
        number, started = note.read_text().split()
        if (pid := int(number)) > 1 and is_alive(pid, started):
            os.kill(pid, 0)  # QEMU, which can write the note of a controller that is not root, may name another's
            return pid
    except (OSError, ValueError):  # there is no note, or not yet all of it
        pass
    return None


def _lock_holder(pidfile: Path) -> int | None:
    try:
        with open_plain(pidfile) as file:
            # struct flock: type, whence, start, len, pid
            query = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, _, _, _, pid = struct.unpack("hhqqi", fcntl.fcntl(file, fcntl.F_GETLK, query)[:28])
    except OSError:
        return None
    if kind == fcntl.F_UNLCK:
        return None
    if pid > 1:
        return int(pid)
    # -1 for a lock of an open file description (fcntl(2)), to which only a taken-over QEMU changes; 0 for a process of
    # another PID namespace. To kill(2) they mean every process, and our own group.
    return next(iter(holders(pidfile)), UNTOLD)


class QMPError(Exception):
    """QEMU refused a command or closed its socket."""


class QMP:
    """One connection to QEMU's QMP socket.

    Args:
        directory: the machine's.
        timeout_seconds: how long to wait for each answer.

    Raises:
        OSError: QEMU does not listen, or gives no answer in time.
        QMPError: QEMU answered with an error, or not as QEMU does.
    """

    def __init__(self, directory: Path = Path(), timeout_seconds: float = 10) -> None:
        self._timeout_seconds = timeout_seconds
        self._received = b""
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.settimeout(timeout_seconds)
            unix_socket.connect(self._socket, directory / CONTROL)
            self._line(time.monotonic() + timeout_seconds)
            self.execute("qmp_capabilities")
        except BaseException:
            self._socket.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def pass_file(self, name: str, descriptor: int) -> None:
        """Gives QEMU an open file under a name.

        Raises:
            OSError, QMPError: as `execute`.
        """
        self.execute("getfd", (descriptor,), fdname=name)

    def wait_for_migration(self, deadline: float, look: Callable[[], None] = lambda: None) -> None:
        """Waits until the machine has been written to, or read from, its file.

        Args:
            deadline: in time.monotonic() seconds.
            look: called again and again meanwhile; what it raises ends the waiting.

        Raises:
            OSError: QEMU gave no answer in time.
            QMPError: it failed, or the deadline passed.
        """
        while True:
            answer = self.execute("query-migrate")
            status = answer.get("status") if isinstance(answer, dict) else None
            if status == "completed":
                return
            look()
            if status == "failed" or time.monotonic() > deadline:
                raise QMPError(f"migration: {'failed' if status == 'failed' else 'not completed in time'}")
            time.sleep(0.01)

    def execute(self, name: str, descriptors: tuple[int, ...] = (), /, **arguments: Any) -> Any:
        """Runs one QMP command and returns what it returned, which may be anything if the machine took QEMU over.

        Args:
            descriptors: open files that QEMU gets with the command.

        Raises:
            OSError: it gave no answer in time.
            QMPError: it answered with an error, or not as QEMU does.
        """
        deadline = time.monotonic() + self._timeout_seconds
        self._socket.settimeout(self._timeout_seconds)
        command = json.dumps({"execute": name, "arguments": arguments}).encode() + b"\n"
        if descriptors:
            socket.send_fds(self._socket, [command], descriptors)
        else:
            self._socket.sendall(command)
        while True:
            try:
                answer = json.loads(self._line(deadline))
            except (ValueError, RecursionError) as error:
                raise QMPError(f"QEMU's answer cannot be read: {type(error).__name__}") from error
            if not isinstance(answer, dict):
                raise QMPError("QEMU's answer is not an object")
            if "return" in answer:
                return answer["return"]
            if "error" in answer:
                problem = answer["error"]
                words = problem.get("desc") if isinstance(problem, dict) else None
                said = encodable(words[:MESSAGE_CHARACTERS]) if isinstance(words, str) else "refused"
                raise QMPError(f"{name}: {said}")

    def version(self) -> str:
        """Returns QEMU's version, such as 7.2.19.

        Raises:
            OSError, QMPError: as `execute`.
        """
        answer = self.execute("query-version")
        numbers = answer.get("qemu") if isinstance(answer, dict) else None
        parts = [numbers.get(name) for name in ("major", "minor", "micro")] if isinstance(numbers, dict) else [None]
        if not all(type(part) is int and 0 <= part < MOST_OF_A_VERSION for part in parts):
            raise QMPError("query-version: QEMU answered without a version")
        return ".".join(map(str, parts))

    def status(self) -> object:
        """Returns the machine's status, such as "running"; None if QEMU's answer has none.

        Raises:
            OSError, QMPError: as `execute`.
        """
        answer = self.execute("query-status")
        return answer.get("status") if isinstance(answer, dict) else None

    def monitor(self, command: str) -> str:
        """Runs a command of QEMU's human monitor and returns its text.

        Raises:
            OSError, QMPError: as `execute`.
        """
        text = self.execute("human-monitor-command", **{"command-line": command})
        if not isinstance(text, str):
            raise QMPError(f"{command}: QEMU answered without a text")
        return text

    def _line(self, deadline: float) -> bytes:
        """Returns the next line: an answer, an event, or the greeting."""
        while b"\n" not in self._received:
            seconds = deadline - time.monotonic()
            if seconds <= 0:
                raise TimeoutError("QEMU did not answer in time")
            self._socket.settimeout(seconds)
            if not (data := self._socket.recv(64 << 10)):
                raise QMPError("QEMU closed the connection")
            self._received += data
            if len(self._received) > LINE_BYTES:
                raise QMPError("QEMU sent a line that is too long")
        line, _, self._received = self._received.partition(b"\n")
        if time.monotonic() > deadline:
            raise TimeoutError("QEMU sent no answer among its events")
        return line


def wait_for_qmp(alive: Callable[[], bool], deadline: float, directory: Path = Path()) -> QMP:
    """Connects as soon as QEMU listens.

    Args:
        directory: the machine's.
        alive: called between attempts; waiting ends when it returns False.
        deadline: in time.monotonic() seconds.

    Raises:
        QMPError: QEMU ended, or the deadline passed.
    """
    while True:
        try:
            return QMP(directory)
        except (OSError, QMPError, ValueError) as error:
            if not alive() or time.monotonic() > deadline:
                raise QMPError("QEMU did not open its control socket") from error
            time.sleep(0.02)


def paused_by_full_disk(directory: Path) -> bool:
    """Whether QEMU says that it paused a machine because the host's disk is full (-drive, werror=enospc).

    False as well if QEMU has ended, or is busy with another client.

    Args:
        directory: the machine's.
    """
    try:
        with QMP(directory, STATUS_SECONDS) as qmp:
            return qmp.status() == FULL_DISK
    except (OSError, QMPError):
        return False
