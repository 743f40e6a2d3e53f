"""From what a task asks for to the size of a machine. It asks no cloud, and reads nothing.

Of the host it asks one thing, and only if the caller does not say: how many CPUs it has.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable

from provisioner.errors import UnavailableError
from provisioner.family.manifest import Resources
from provisioner.models import MachineSize, VMSpec

# A primary machine whose manifest names no resources.
DEFAULT_CPUS = 1.0
DEFAULT_MEMORY_GIB = 1.0

# The base images' file systems are this large, so no disk of ours is smaller. The Task Standard asks for 8.
MINIMUM_DISK_GIB = 16
# The Task Standard's root volume for ubuntu-20.04-cuda.
CUDA_DISK_GIB = 125

# Debian 12 with its initramfs does not boot below it.
MINIMUM_MEMORY_GIB = 0.5

# A machine in which an image is built.
BUILDER_CPUS = 2
BUILDER_MEMORY_GIB = 4.0

# More vCPUs than this for each one of the host only wait for each other.
CPU_OVERCOMMIT = 16

_MIB_PER_GIB = 1024


def smallest_size(
    cpu_range: tuple[float, float], memory_gib_range: tuple[float, float], disk_gib: int = MINIMUM_DISK_GIB
) -> MachineSize:
    """The smallest machine inside both inclusive ranges: whole vCPUs, memory in whole MiB, at least what boots.

    Args:
        cpu_range: lowest and highest count of vCPUs.
        memory_gib_range: lowest and highest memory in GiB.
        disk_gib: the root volume in GiB.

    Raises:
        UnavailableError: no machine lies inside the ranges.
    """
    low, high = cpu_range
    cpus = max(1, math.ceil(low))
    if cpus > high:
        raise UnavailableError(
            f"No whole number of vCPUs lies between {low:g} and {high:g}.", hint="Widen cpu_count_range."
        )
    low, high = memory_gib_range
    if high < MINIMUM_MEMORY_GIB:
        raise UnavailableError(
            f"At most {high:g} GiB of memory are asked for, and Debian does not boot with less than "
            f"{MINIMUM_MEMORY_GIB} GiB.",
            hint="Raise the upper end of ram_gib_range.",
        )
    memory_gib = max(MINIMUM_MEMORY_GIB, math.ceil(low * _MIB_PER_GIB) / _MIB_PER_GIB)
    if memory_gib > high:
        raise UnavailableError(
            f"No whole number of MiB lies between {low!r} and {high!r} GiB of memory.", hint="Widen ram_gib_range."
        )
    return MachineSize(cpus=cpus, memory_gib=memory_gib, disk_gib=disk_gib)


def size_of_primary(resources: Resources) -> MachineSize:
    """The size of a primary machine: what its manifest names, rounded up, or the defaults above.

    A GPU is no part of a size: the cloud is told of it, and refuses it or not.
    """
    cpus = resources.cpus or DEFAULT_CPUS
    memory_gib = resources.memory_gb or DEFAULT_MEMORY_GIB
    disk_gib = max(MINIMUM_DISK_GIB, math.ceil(resources.storage_gb or 0))
    # A manifest names what is needed at least, so the next larger machine is right too.
    return smallest_size((cpus, math.inf), (memory_gib, math.inf), disk_gib)


def size_of_aux_vm(spec: VMSpec) -> MachineSize:
    """The size of an aux VM: the smallest inside the ranges of its spec. For the GPU see size_of_primary.

    Raises:
        UnavailableError: no machine lies inside the ranges.
    """
    disk_gib = CUDA_DISK_GIB if spec.base_image_type == "ubuntu-20.04-cuda" else MINIMUM_DISK_GIB
    return smallest_size(spec.cpu_count_range, spec.ram_gib_range, disk_gib)


def check_local_limits(
    size: MachineSize,
    *,
    host_memory_gib: float,
    host_cpus: int | None = None,
    host_architecture: str = "x64",
    gpu: bool = False,
    spec: VMSpec | None = None,
) -> None:
    """Checks that the local cloud can give a machine.

    Args:
        size: the machine's size.
        host_memory_gib: the host's memory.
        host_cpus: the host's CPUs; by default, those that this process sees.
        host_architecture: `x64` or `arm64`, in the Task Standard's words.
        gpu: whether a primary machine asks for a GPU.
        spec: the aux VM's spec; None for a primary machine.

    Raises:
        UnavailableError: it cannot; the hint says what to use instead.
    """
    machine = "aux VM" if spec else "primary machine"
    if gpu or (spec and spec.gpu_spec):
        raise UnavailableError(f"The {machine} asks for a GPU, which local machines do not have.", hint=_ELSEWHERE)
    if spec and spec.base_image_type == "ubuntu-20.04-cuda":
        raise UnavailableError("The aux VM asks for ubuntu-20.04-cuda, which exists only on AWS.", hint=_ELSEWHERE)
    if spec and spec.cpu_architecture not in (None, host_architecture):
        raise UnavailableError(
            f"The aux VM asks for an {spec.cpu_architecture} CPU, and this host's is {host_architecture}.",
            hint=_ELSEWHERE,
        )
    if size.memory_gib > host_memory_gib:
        raise UnavailableError(
            f"The {machine} asks for {size.memory_gib:g} GiB of memory, and this host has {host_memory_gib:.1f} GiB.",
            hint=f"{_ELSEWHERE} Or ask for less in {'ram_gib_range' if spec else 'memory_gb of the manifest'}.",
        )
    most_cpus = CPU_OVERCOMMIT * (host_cpus or os.cpu_count() or 1)
    if size.cpus > most_cpus:
        raise UnavailableError(
            f"The {machine} asks for {size.cpus} vCPUs, and this host can give {most_cpus} at most.",
            hint=f"{_ELSEWHERE} Or ask for less in {'cpu_count_range' if spec else 'cpus of the manifest'}.",
        )


def check_local_memory(sizes: Iterable[MachineSize], *, host_memory_gib: float) -> None:
    """Checks that the host can hold an environment's machines at once.

    Raises:
        UnavailableError: it cannot.
    """
    wanted = sum(size.memory_gib for size in sizes)
    if wanted > host_memory_gib:
        raise UnavailableError(
            f"The machines ask for {wanted:g} GiB of memory together, and this host has {host_memory_gib:.1f} GiB.",
            hint=f"{_ELSEWHERE} Or ask for less in memory_gb of the manifest or in ram_gib_range.",
        )


_ELSEWHERE = "Use --cloud aws."
