"""Turns what a task asks for into the size of a machine, whatever the cloud. Pure: it asks neither host nor cloud."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from provisioner.base.errors import UnavailableError
from provisioner.base.models import MachineSize, VMSpec

if TYPE_CHECKING:  # reading manifests takes YAML, which takes long to import
    from provisioner.family.manifest import Resources

# What a primary machine gets if its manifest names no resources.
DEFAULT_CPUS = 1.0
DEFAULT_MEMORY_GIB = 1.0

# The base images' file systems are this large, so no disk is smaller. The Task Standard asks for 8.
MINIMUM_DISK_GIB = 16
# The Task Standard's root volume for ubuntu-20.04-cuda.
CUDA_DISK_GIB = 125

# Debian 12 with its initramfs does not boot with less.
MINIMUM_MEMORY_GIB = 0.5

# What a machine gets in which an image is built.
BUILDER_CPUS = 2
BUILDER_MEMORY_GIB = 4.0

_MIB_PER_GIB = 1024


def smallest_size(
    cpu_range: tuple[float, float], memory_gib_range: tuple[float, float], disk_gib: int = MINIMUM_DISK_GIB
) -> MachineSize:
    """Returns the smallest machine inside both ranges, with whole vCPUs, whole MiB of memory, and enough to boot.

    Args:
        cpu_range: lowest and highest number of vCPUs, both included.
        memory_gib_range: lowest and highest memory in GiB, both included.
        disk_gib: size of the root volume in GiB.

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
            f"The machine may have at most {high:g} GiB of memory, but Debian needs at least "
            f"{MINIMUM_MEMORY_GIB} GiB to boot.",
            hint="Raise the upper end of ram_gib_range.",
        )
    memory_gib = max(MINIMUM_MEMORY_GIB, math.ceil(low * _MIB_PER_GIB) / _MIB_PER_GIB)
    if memory_gib > high:
        raise UnavailableError(
            f"No whole number of MiB lies between {low!r} and {high!r} GiB of memory.", hint="Widen ram_gib_range."
        )
    return MachineSize(cpus=cpus, memory_gib=memory_gib, disk_gib=disk_gib)


def size_of_primary(resources: Resources) -> MachineSize:
    """Returns the size of a primary machine: what its manifest names, rounded up, or the defaults above.

    A GPU is not part of a size: each cloud decides whether it can provide one.
    """
    cpus = resources.cpus or DEFAULT_CPUS
    memory_gib = resources.memory_gb or DEFAULT_MEMORY_GIB
    disk_gib = max(MINIMUM_DISK_GIB, math.ceil(resources.storage_gb or 0))
    # A manifest names a minimum, so a larger machine is right too.
    return smallest_size((cpus, math.inf), (memory_gib, math.inf), disk_gib)


def size_of_aux_vm(spec: VMSpec) -> MachineSize:
    """Returns the size of an aux VM: the smallest inside the ranges of its spec. For GPUs see size_of_primary.

    Raises:
        UnavailableError: no machine lies inside the ranges.
    """
    disk_gib = CUDA_DISK_GIB if spec.base_image_type == "ubuntu-20.04-cuda" else MINIMUM_DISK_GIB
    return smallest_size(spec.cpu_count_range, spec.ram_gib_range, disk_gib)
