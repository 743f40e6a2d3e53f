"""Looks at what a machine meets of this host: its devices in QEMU, and how the processes beside it are enclosed.

The kernel and QEMU's monitor say it, never the machine. A machine that has taken QEMU over answers for the monitor: its
answers are bounded, and how QEMU is enclosed does not depend on them.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from provisioner.base.errors import IsolationError
from provisioner.base.models import Role
from provisioner.base.printable import beginning, printable
from provisioner.clouds.local import host
from provisioner.clouds.local.network import egress
from provisioner.clouds.local.vm import qemu
from provisioner.recording.isolation import MOST_DEVICES, NAMESPACES, Enclosure, Surface

SHOWN_CHARACTERS = 200
# The kernel's name of a virtual machine's descriptor (kvm_dev_ioctl_create_vm).
KVM = "anon_inode:kvm-vm"
# Of vendor and device (QEMU's docs/specs/pci-ids.rst). Others are told by these numbers.
DEVICES = {
    0x808629C0: "q35 host bridge",
    0x80862918: "ich9 isa bridge",
    0x1AF41000: "virtio-net",
    0x1AF41001: "virtio-blk",
    0x1AF41003: "virtio-serial",
    0x1AF41005: "virtio-rng",
}


def look(directory: Path, role: Role) -> Surface:
    """Returns what a running machine meets.

    Args:
        directory: the machine's.

    Raises:
        IsolationError: it cannot be seen.
    """
    try:
        pid, proxy = qemu.live_pid(directory / qemu.PIDFILE), egress.pid_of(directory)
        if pid is None:
            raise ValueError("QEMU does not run")
        with qemu.QMP(directory) as qmp:
            version, buses = qmp.version(), qmp.execute("query-pci")
        return Surface(
            accelerator="KVM" if _has_open(pid, KVM) else "TCG",
            qemu=version,
            passt="" if proxy is None else host.installed("passt"),
            devices=_devices(buses),
            qemu_process=enclosure(pid),
            proxy_process=None if proxy is None else enclosure(proxy),
        )
    except (OSError, ValueError, qemu.QMPError) as error:
        why = beginning(printable(str(error)), SHOWN_CHARACTERS)
        raise IsolationError(f"What the {role} machine meets cannot be seen from outside: {why}") from error


def enclosure(pid: int) -> Enclosure:
    """Returns how the kernel encloses a process (proc(5), namespaces(7)).

    Raises:
        OSError: it has ended, or may not be looked at.
        ValueError: the kernel does not say all of it.
    """
    lines = Path(f"/proc/{pid}/status").read_bytes().decode(errors="replace").split("\n")
    status = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    try:
        return Enclosure(
            uid=int(status["Uid"][1]),
            seccomp=int(status["Seccomp_filters"][0]),
            no_new_privileges=status["NoNewPrivs"] == ["1"],
            capabilities=status["CapEff"][0],
            namespaces=tuple(name for name in NAMESPACES if _namespace(str(pid), name) != _namespace("self", name)),
        )
    except (KeyError, IndexError) as error:
        raise ValueError(f"/proc/{pid}/status lacks {error}") from error


def _namespace(process: str, name: str) -> Path:
    return Path(f"/proc/{process}/ns/{name}").readlink()


def _has_open(pid: int, name: str) -> bool:
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if str(descriptor.readlink()) == name:
                return True
    return False


def _devices(buses: object) -> tuple[str, ...]:
    """Names each PCI function of QEMU's answer to query-pci by its place and kind.

    Raises:
        ValueError: the answer is none of QEMU's.
    """
    try:
        found = [
            f"{int(device['bus']):02x}:{int(device['slot']):02x}.{int(device['function']):x} "
            + DEVICES.get(kind := device["id"]["vendor"] << 16 | device["id"]["device"], f"{kind:08x}")
            for bus in buses  # type: ignore[attr-defined]
            for device in bus["devices"]
        ]
    except (TypeError, KeyError, AttributeError, OverflowError) as error:
        raise ValueError("QEMU answered query-pci without devices") from error
    if len(found) > MOST_DEVICES:
        raise ValueError("QEMU answered query-pci with too many devices")
    return tuple(found)
