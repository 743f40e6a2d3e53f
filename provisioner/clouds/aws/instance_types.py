"""From what a machine asks for to the cheapest instance type that fits. Pure: catalogue and prices are data.

An instance type whose price is unknown or zero is never chosen: an unknown price must not count as none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from decimal import Decimal

from provisioner.clouds.sizing import BUILDER_CPUS, BUILDER_MEMORY_GIB, size_of_aux_vm, size_of_primary
from provisioner.costs.prices import Price
from provisioner.errors import UnavailableError
from provisioner.family.manifest import Resources
from provisioner.models import Architecture, GpuSpec, MachineSize, Record, Role, VMSpec

# The Task Standard's names of GPUs where AWS sells them under another.
GPU_NAMES = {"a10": {"a10", "a10g"}}
# So many types are tried, one after the other, where the cheapest have no capacity.
ALTERNATIVES = 4


class InstanceType(Record):
    """A machine type as EC2 sells it (DescribeInstanceTypes).

    Args:
        gpu_model: AWS's name, in lower case; None without a GPU.
    """

    name: str
    vcpus: int
    memory_gib: float
    architecture: Architecture
    gpu_model: str | None = None
    gpu_count: int = 0


class Need(Record):
    """What a machine asks for; both ends of each range belong to it.

    Args:
        architecture: None leaves it to the price.
        gpu: None means no GPU.
    """

    cpus: tuple[float, float]
    memory_gib: tuple[float, float]
    architecture: Architecture | None = None
    gpu: GpuSpec | None = None


class Catalogue(Record):
    """What EC2 sells in a region and for how much.

    Args:
        prices: of an hour on demand, by instance type; of a GiB-month (`gp3`) and an address's hour (`ipv4`).
    """

    types: tuple[InstanceType, ...]
    prices: dict[str, Price]

    @property
    def hourly_usd(self) -> dict[str, Decimal]:
        """US dollars for an hour on demand, by instance type."""
        return {one.name: self.prices[one.name].usd for one in self.types if one.name in self.prices}


def choose_machines(resources: Resources, aux: VMSpec | None, catalogue: Catalogue) -> dict[Role, MachineSize]:
    """The machines of one environment by role, of the cheapest types that fit.

    Raises:
        UnavailableError: no type fits, or none of those that do has a price.
    """
    gpu = GpuSpec(count_range=resources.gpu.count_range, model=resources.gpu.model) if resources.gpu else None
    least = size_of_primary(resources)
    # A family's code and build steps know one architecture; only a spec can leave it open.
    need = Need(cpus=(least.cpus, math.inf), memory_gib=(least.memory_gib, math.inf), architecture="x64", gpu=gpu)
    chosen: dict[Role, MachineSize] = {"primary": _size(need, least.disk_gib, "primary machine", catalogue)}
    if aux:
        need = Need(
            cpus=aux.cpu_count_range,
            memory_gib=aux.ram_gib_range,
            architecture=aux.cpu_architecture,
            gpu=aux.gpu_spec,
        )
        chosen["aux"] = _size(need, size_of_aux_vm(aux).disk_gib, "aux VM", catalogue)
    return chosen


def choose_builder(architecture: Architecture, disk_gib: int, catalogue: Catalogue) -> MachineSize:
    """The machine in which an image is built: cheap, and no smaller than a local builder."""
    need = Need(cpus=(BUILDER_CPUS, math.inf), memory_gib=(BUILDER_MEMORY_GIB, math.inf), architecture=architecture)
    return _size(need, disk_gib, "image builder", catalogue)


def _size(need: Need, disk_gib: int, what: str, catalogue: Catalogue) -> MachineSize:
    types = cheapest(need, what, catalogue.types, catalogue.hourly_usd)
    first = types[0]
    # An image boots on one architecture: the cheapest decides.
    alike = [one.name for one in types if one.architecture == first.architecture]
    return MachineSize(
        cpus=first.vcpus,
        memory_gib=first.memory_gib,
        disk_gib=disk_gib,
        architecture=first.architecture,
        types=tuple(alike[:ALTERNATIVES]),
    )


def cheapest(
    need: Need, what: str, types: Iterable[InstanceType], hourly_usd: Mapping[str, Decimal]
) -> list[InstanceType]:
    """The instance types that fit and have a price, the cheapest first.

    Args:
        what: what messages call the machine.

    Raises:
        UnavailableError: none fits, or none of those that fit has a price.
    """
    fitting = [one for one in types if _fits(one, need)]
    if not fitting:
        raise UnavailableError(
            f"The {what} asks for {_words(need)}: EC2 sells no such instance type here.",
            hint="Widen what its spec or manifest asks for, or use another --region.",
        )
    priced = [one for one in fitting if hourly_usd.get(one.name, Decimal(0)) > 0]
    if not priced:
        names = ", ".join(sorted(one.name for one in fitting)[:5])
        raise UnavailableError(
            f"The {what} asks for {_words(need)}: no price is known for any type that fits, such as {names}.",
            hint="An unknown price is never taken for none. May these credentials call pricing:GetProducts?",
        )
    return sorted(priced, key=lambda one: (hourly_usd[one.name], -one.vcpus, one.name))


def _fits(one: InstanceType, need: Need) -> bool:
    return (
        need.cpus[0] <= one.vcpus <= need.cpus[1]
        and need.memory_gib[0] <= one.memory_gib <= need.memory_gib[1]
        and need.architecture in (None, one.architecture)
        and _gpu_fits(one, need.gpu)
    )


def _gpu_fits(one: InstanceType, gpu: GpuSpec | None) -> bool:
    if gpu is None:
        return one.gpu_count == 0
    wanted = gpu.model.lower()
    low, high = gpu.count_range
    return one.gpu_model in GPU_NAMES.get(wanted, {wanted}) and low <= one.gpu_count <= high


def _words(need: Need) -> str:
    parts = [f"{_range(need.cpus)} vCPUs", f"{_range(need.memory_gib)} GiB of memory"]
    if need.architecture:
        parts.append(f"{need.architecture} CPUs")
    if need.gpu:
        parts.append(f"{_range(need.gpu.count_range)} {need.gpu.model} GPUs")
    return ", ".join(parts)


def _range(pair: tuple[float, float]) -> str:
    low, high = pair
    if math.isinf(high):
        return f"at least {low:g}"
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"
