"""Computes a machine's size from a task's requirements. Asks no cloud; only `check_local_limits` may count the CPUs."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable

from provisioner.errors import UnavailableError
from provisioner.family.manifest import Resources
from provisioner.models import MachineSize, VMSpec

# The size of a primary machine whose manifest names no resources.
DEFAULT_CPUS = 1.0
DEFAULT_MEMORY_GIB = 1.0

# The base images' file systems are this large, so no disk can be smaller. The Task Standard asks for 8.
MINIMUM_DISK_GIB = 16
# The Task Standard's root volume for ubuntu-20.04-cuda.
CUDA_DISK_GIB = 125

# Debian 12 with its initramfs does not boot with less.
MINIMUM_MEMORY_GIB = 0.5

# The size of a machine in which an image is built.
BUILDER_CPUS = 2
BUILDER_MEMORY_GIB = 4.0

# More vCPUs than this per CPU of the host would only wait for each other.
CPU_OVERCOMMIT = 16

_MIB_PER_GIB = 1024


def smallest_size(
    cpu_range: tuple[float, float], memory_gib_range: tuple[float, float], disk_gib: int = MINIMUM_DISK_GIB
) -> MachineSize:
    """Returns the smallest bootable size inside both inclusive ranges, with whole vCPUs and whole MiB of memory.

    Args:
        cpu_range: lowest and highest number of vCPUs.
        memory_gib_range: lowest and highest memory in GiB.
        disk_gib: the root volume in GiB.

    Raises:
        UnavailableError: no size lies inside the ranges.
    """
    low, high = cpu_range
    cpus = max(1, math.ceil(low))
    if cpus > high:
        raise UnavailableError(
            f"There is no whole number of vCPUs between {low:g} and {high:g}.", hint="Widen cpu_count_range."
        )
    low, high = memory_gib_range
    if high < MINIMUM_MEMORY_GIB:
        raise UnavailableError(
            f"At most {high:g} GiB of memory are allowed, but Debian does not boot with less than "
            f"{MINIMUM_MEMORY_GIB} GiB.",
            hint="Raise the upper end of ram_gib_range.",
        )
    memory_gib = max(MINIMUM_MEMORY_GIB, math.ceil(low * _MIB_PER_GIB) / _MIB_PER_GIB)
    if memory_gib > high:
        raise UnavailableError(
            f"There is no whole number of MiB between {low!r} and {high!r} GiB of memory.", hint="Widen ram_gib_range."
        )
    return MachineSize(cpus=cpus, memory_gib=memory_gib, disk_gib=disk_gib)


def size_of_primary(resources: Resources) -> MachineSize:
    """Returns the size of a primary machine: the manifest's resources, rounded up, or the defaults above.

    A GPU is not part of a size: the cloud decides whether it can provide one.
    """
    cpus = resources.cpus or DEFAULT_CPUS
    memory_gib = resources.memory_gb or DEFAULT_MEMORY_GIB
    disk_gib = max(MINIMUM_DISK_GIB, math.ceil(resources.storage_gb or 0))
    # A manifest names minimum resources, so rounding up is allowed.
    return smallest_size((cpus, math.inf), (memory_gib, math.inf), disk_gib)


def size_of_aux_vm(spec: VMSpec) -> MachineSize:
    """Returns the size of an aux VM: the smallest inside the ranges of its spec. For the GPU see size_of_primary.

    Raises:
        UnavailableError: no size lies inside the ranges.
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
    """Checks that the local cloud can provide a machine.

    Args:
        size: the machine's size.
        host_memory_gib: the host's memory in GiB.
        host_cpus: the number of the host's CPUs; None counts them.
        host_architecture: `x64` or `arm64`, in the Task Standard's words.
        gpu: whether a primary machine asks for a GPU.
        spec: the aux VM's spec; None for a primary machine.

    Raises:
        UnavailableError: it cannot; the hint names an alternative.
    """
    machine = "aux VM" if spec else "primary machine"
    if gpu or (spec and spec.gpu_spec):
        raise UnavailableError(f"The {machine} asks for a GPU, but local machines have none.", hint=_ELSEWHERE)
    if spec and spec.base_image_type == "ubuntu-20.04-cuda":
        raise UnavailableError("The aux VM asks for ubuntu-20.04-cuda, which only AWS has.", hint=_ELSEWHERE)
    if spec and spec.cpu_architecture not in (None, host_architecture):
        raise UnavailableError(
            f"The aux VM asks for an {spec.cpu_architecture} CPU, but this host's is {host_architecture}.",
            hint=_ELSEWHERE,
        )
    if size.memory_gib > host_memory_gib:
        raise UnavailableError(
            f"The {machine} asks for {size.memory_gib:g} GiB of memory, but this host has {host_memory_gib:.1f} GiB.",
            hint=f"{_ELSEWHERE} Or ask for less in {'ram_gib_range' if spec else 'memory_gb of the manifest'}.",
        )
    most_cpus = CPU_OVERCOMMIT * (host_cpus or os.cpu_count() or 1)
    if size.cpus > most_cpus:
        raise UnavailableError(
            f"The {machine} asks for {size.cpus} vCPUs, but this host can provide at most {most_cpus}.",
            hint=f"{_ELSEWHERE} Or ask for less in {'cpu_count_range' if spec else 'cpus of the manifest'}.",
        )


def check_local_memory(sizes: Iterable[MachineSize], *, host_memory_gib: float) -> None:
    """Checks that the host has enough memory for all of an environment's machines at once.

    Raises:
        UnavailableError: it has not.
    """
    memory_gib = sum(size.memory_gib for size in sizes)
    if memory_gib > host_memory_gib:
        raise UnavailableError(
            f"The machines ask for {memory_gib:g} GiB of memory together, but this host has {host_memory_gib:.1f} GiB.",
            hint=f"{_ELSEWHERE} Or ask for less in memory_gb of the manifest or in ram_gib_range.",
        )


_ELSEWHERE = "Use --cloud aws."
