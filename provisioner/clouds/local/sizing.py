"""Chooses the sizes of local machines, within what this host has."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from provisioner.base.errors import UnavailableError
from provisioner.base.models import MachineSize, Role, VMSpec
from provisioner.clouds.cloud import Scarcity
from provisioner.clouds.sizing import size_of_aux_vm, size_of_primary

if TYPE_CHECKING:  # reading manifests takes YAML, which takes long to import
    from provisioner.family.manifest import Resources

# More vCPUs than this for each CPU of the host only wait for one another.
CPU_OVERCOMMIT = 16

SCARCITY = Scarcity(
    room="If each machine uses all of its memory and its share of the disk, this host has room",
    remedy="Ask for less in memory_gb or storage_gb of the manifest, or wait until other programs have ended; "
    "`provisioner image prune` frees disk.",
    each_controller=True,
)
MEMINFO = Path("/proc/meminfo")
_ELSEWHERE = "Use the cloud aws."


def choose_machines(resources: Resources, aux: VMSpec | None) -> dict[Role, MachineSize]:
    """Chooses the smallest machines that satisfy a task's manifest and its aux VM's spec.

    Raises:
        UnavailableError: this host cannot provide them.
    """
    memory_gib = _host_memory_gib()
    sizes: dict[Role, MachineSize] = {"primary": size_of_primary(resources)}
    check_machine_fits(sizes["primary"], host_memory_gib=memory_gib, gpu=resources.gpu is not None)
    if aux:
        sizes["aux"] = size_of_aux_vm(aux)
        check_machine_fits(sizes["aux"], host_memory_gib=memory_gib, spec=aux)
    check_machines_fit_together(sizes.values(), host_memory_gib=memory_gib)
    return sizes


def _host_memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)


def available_memory_gib(meminfo: Path = MEMINFO) -> float:
    """Returns how much memory this host can give to new processes without taking any from others (proc(5))."""
    for line in meminfo.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) / (1 << 20)
    return _host_memory_gib()


def fitting(sizes: Collection[MachineSize], available_gib: float) -> int:
    """Returns how many environments with such machines fit into memory if all write to all of theirs. Pure."""
    return int(available_gib / sum(size.memory_gib for size in sizes))


def memory_text(sizes: Collection[MachineSize], available_gib: float) -> str:
    """Says how many environments with such machines fit into memory beside what runs now. Pure."""
    gib = sum(size.memory_gib for size in sizes)
    return (
        f"up to {gib:g} GiB of memory, of {available_gib:.1f} GiB available now: {fitting(sizes, available_gib)} fit "
        "if each uses all of its memory, more if not (machines from one template share what they have not changed)"
    )


def memory_shortage(sizes: Collection[MachineSize], count: int, available_gib: float) -> str:
    """Says that memory has no room for so many environments with such machines, if it has not. Pure.

    Args:
        sizes: the machines of one environment, each of which may write to all of its memory.
        available_gib: beside what runs now.
    """
    gib = sum(size.memory_gib for size in sizes)
    fit = fitting(sizes, available_gib)
    if count <= fit:
        return ""
    return (
        f"this host has {available_gib:.1f} GiB of memory available, room for {fit} environments "
        f"of {gib:g} GiB, not for {count}"
    )


def check_machine_fits(
    size: MachineSize,
    *,
    host_memory_gib: float,
    host_cpus: int | None = None,
    gpu: bool = False,
    spec: VMSpec | None = None,
) -> None:
    """Checks that this host can provide a machine.

    Args:
        size: the machine's size.
        host_memory_gib: the host's memory in GiB.
        host_cpus: the number of the host's CPUs; by default, those that this process sees.
        gpu: whether a primary machine asks for a GPU.
        spec: the aux VM's spec; None for a primary machine.

    Raises:
        UnavailableError: it cannot; the hint says what to do instead.
    """
    machine = "aux VM" if spec else "primary machine"
    if gpu or (spec and spec.gpu_spec):
        raise UnavailableError(
            f"The {machine} asks for a GPU, which local machines do not have.", hint=_ELSEWHERE, settings=("cloud",)
        )
    if spec and spec.base_image_type == "ubuntu-20.04-cuda":
        raise UnavailableError(
            "The aux VM asks for ubuntu-20.04-cuda, which exists only on AWS.", hint=_ELSEWHERE, settings=("cloud",)
        )
    if spec and spec.cpu_architecture not in (None, "x64"):
        raise UnavailableError(
            f"The aux VM asks for an {spec.cpu_architecture} CPU, and this host's is x64.",
            hint=_ELSEWHERE,
            settings=("cloud",),
        )
    if size.memory_gib > host_memory_gib:
        raise UnavailableError(
            f"The {machine} asks for {size.memory_gib:g} GiB of memory, and this host has {host_memory_gib:.1f} GiB.",
            hint=f"{_ELSEWHERE} Or ask for less in {'ram_gib_range' if spec else 'memory_gb of the manifest'}.",
            settings=("cloud",),
        )
    maximum_cpus = CPU_OVERCOMMIT * (host_cpus or os.cpu_count() or 1)
    if size.cpus > maximum_cpus:
        raise UnavailableError(
            f"The {machine} asks for {size.cpus} vCPUs, and this host can provide at most {maximum_cpus}.",
            hint=f"{_ELSEWHERE} Or ask for less in {'cpu_count_range' if spec else 'cpus of the manifest'}.",
            settings=("cloud",),
        )


def check_machines_fit_together(sizes: Iterable[MachineSize], *, host_memory_gib: float) -> None:
    """Checks that this host has the memory for all machines of an environment.

    Raises:
        UnavailableError: it has not.
    """
    memory_gib = sum(size.memory_gib for size in sizes)
    if memory_gib > host_memory_gib:
        raise UnavailableError(
            f"The machines ask for {memory_gib:g} GiB of memory together, and this host has {host_memory_gib:.1f} GiB.",
            hint=f"{_ELSEWHERE} Or ask for less in memory_gb of the manifest or in ram_gib_range.",
            settings=("cloud",),
        )


def check_disks_fit(sizes: Collection[MachineSize], *, overcommit: float, host_disk_gib: float) -> None:
    """Checks that an empty disk of this host would have room for what the machines' disks are guaranteed.

    Args:
        sizes: the machines of one environment.
        overcommit: the setting `disk_overcommit`.
        host_disk_gib: what an empty disk would have for machines, in GiB.

    Raises:
        UnavailableError: it would not.
    """
    disk_gib = sum(size.disk_gib for size in sizes)
    if disk_gib / overcommit > host_disk_gib:
        raise UnavailableError(
            f"The machines ask for {disk_gib} GiB of disk, of which {disk_gib / overcommit:.1f} GiB must be free. Even "
            f"empty, this host's disk has no more than {host_disk_gib:.1f} GiB for machines.",
            hint=f"{_ELSEWHERE} Or ask for less in storage_gb of the manifest, or raise disk_overcommit in the "
            f"configuration file, which is {overcommit:g}.",
            settings=("cloud",),
        )
