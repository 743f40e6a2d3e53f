"""Chooses the cheapest instance types that satisfy what a machine asks for. Pure: the catalogue is data.

An instance type whose price is unknown or zero is never chosen: an unknown price must not count as zero.
"""

from __future__ import annotations

import math
from decimal import Decimal
from functools import cached_property

from provisioner.base.errors import UnavailableError
from provisioner.base.models import Architecture, GpuSpec, MachineSize, Record, Role, VMSpec
from provisioner.clouds.sizing import BUILDER_CPUS, BUILDER_MEMORY_GIB, size_of_aux_vm, size_of_primary
from provisioner.costs.prices import Price
from provisioner.family.manifest import Resources

# The Task Standard's names of GPUs that AWS sells under other names.
GPU_NAMES = {"a10": {"a10", "a10g"}}
# GPUs that the driver in Amazon's AMI for ubuntu-20.04-cuda lacks: NVIDIA's open kernel modules need Turing or newer.
# AWS names G4dn, G5, P4d and P5 (release notes of "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 20.04)").
WITHOUT_CUDA_DRIVER = {"k80", "m60", "p100", "v100"}
# How many types are tried, one after another, while the cheapest have no capacity.
ALTERNATIVES = 4


class InstanceType(Record):
    """A machine type as EC2 sells it (DescribeInstanceTypes).

    Args:
        gpu_model: AWS's name, in lower case; None without a GPU.
        has_spot: whether it is sold on the spot market.
        is_free: whether accounts of AWS's free plan may start it.
    """

    name: str
    vcpus: int
    memory_gib: float
    architecture: Architecture
    gpu_model: str | None = None
    gpu_count: int = 0
    has_spot: bool = True
    is_free: bool = False


class Need(Record):
    """What a machine asks for. Both ends of each range are included.

    Args:
        architecture: None for the cheapest.
        gpu: None for no GPU.
    """

    cpus: tuple[float, float]
    memory_gib: tuple[float, float]
    architecture: Architecture | None = None
    gpu: GpuSpec | None = None


class Catalogue(Record):
    """What EC2 sells in a region and for how much.

    Args:
        prices: of an hour on demand, by instance type; of a GiB-month (`gp3`) and an address's hour (`ipv4`).
        is_shipped: whether the types are those of the shipped list, because EC2 could not be asked.
    """

    types: tuple[InstanceType, ...]
    prices: dict[str, Price]
    is_shipped: bool = False

    @cached_property
    def vcpus(self) -> dict[str, int]:
        """The number of vCPUs of each instance type."""
        return {instance_type.name: instance_type.vcpus for instance_type in self.types}

    @property
    def of_spot(self) -> Catalogue:
        """The same without the types that the spot market does not have."""
        return self.model_copy(update={"types": tuple(one for one in self.types if one.has_spot)})

    @property
    def of_free_plan(self) -> Catalogue:
        """The same with the types of AWS's free plan alone."""
        return self.model_copy(update={"types": tuple(one for one in self.types if one.is_free)})

    @property
    def hourly_usd(self) -> dict[str, Decimal]:
        """The price of an hour on demand in US dollars, by instance type."""
        return {
            instance_type.name: self.prices[instance_type.name].usd
            for instance_type in self.types
            if instance_type.name in self.prices
        }


def choose_machines(resources: Resources, aux: VMSpec | None, catalogue: Catalogue) -> dict[Role, MachineSize]:
    """Chooses the machines of one environment by role, of the cheapest types that fit.

    Raises:
        UnavailableError: no type fits, none that fits has a price, or the aux VM's image lacks a driver for its GPU.
    """
    if aux:
        _require_driver(aux)
    gpu = GpuSpec(count_range=resources.gpu.count_range, model=resources.gpu.model) if resources.gpu else None
    least = size_of_primary(resources)
    # A family's code and build steps are made for one architecture; only an aux VM's spec can leave it open.
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


def _require_driver(aux: VMSpec) -> None:
    model = aux.gpu_spec.model if aux.gpu_spec else ""
    if aux.base_image_type == "ubuntu-20.04-cuda" and model.lower() in WITHOUT_CUDA_DRIVER:
        raise UnavailableError(
            f"The aux VM asks for {model} with ubuntu-20.04-cuda, whose driver does not support that GPU.",
            hint="Ask for t4, a10 or a100 in gpu_spec. Or leave base_image_type out, and install NVIDIA's proprietary "
            "driver in build_steps.",
        )


def choose_builder(architecture: Architecture, disk_gib: int, catalogue: Catalogue) -> MachineSize:
    """Chooses the machine in which an image is built: the cheapest no smaller than a local builder."""
    need = Need(cpus=(BUILDER_CPUS, math.inf), memory_gib=(BUILDER_MEMORY_GIB, math.inf), architecture=architecture)
    return _size(need, disk_gib, "image builder", catalogue)


def _size(need: Need, disk_gib: int, what: str, catalogue: Catalogue) -> MachineSize:
    types = cheapest(need, what, catalogue)
    first = types[0]
    # An image boots on one architecture: that of the cheapest type.
    of_one_architecture = [candidate.name for candidate in types if candidate.architecture == first.architecture]
    return MachineSize(
        cpus=first.vcpus,
        memory_gib=first.memory_gib,
        disk_gib=disk_gib,
        architecture=first.architecture,
        types=tuple(of_one_architecture[:ALTERNATIVES]),
    )


def cheapest(need: Need, what: str, catalogue: Catalogue) -> list[InstanceType]:
    """Lists the instance types that fit and have a price, the cheapest first.

    Args:
        what: the machine's name in messages.

    Raises:
        UnavailableError: none fits, or none that fits has a price.
    """
    fitting = [candidate for candidate in catalogue.types if _fits(candidate, need)]
    if not fitting:
        raise _unavailable(need, what, catalogue)
    hourly_usd = catalogue.hourly_usd
    priced = [candidate for candidate in fitting if candidate.name in hourly_usd]
    if not priced:
        names = ", ".join(sorted(candidate.name for candidate in fitting)[:5])
        raise UnavailableError(
            f"The {what} asks for {_words(need)}: no price is known for any type that fits, such as {names}.",
            hint="An unknown price never counts as zero. May these credentials call pricing:GetProducts? "
            "`prices` in the configuration names a list of your own.",
        )
    return sorted(priced, key=lambda candidate: (hourly_usd[candidate.name], -candidate.vcpus, candidate.name))


def _unavailable(need: Need, what: str, catalogue: Catalogue) -> UnavailableError:
    """Returns the error for a need that no type fits, with the machines that have such a GPU if there are any."""
    asks = f"The {what} asks for {_words(need)}"
    with_gpu = [each for each in catalogue.types if need.gpu and each.gpu_count and _is_model(each, need.gpu)]
    if need.gpu and with_gpu:
        with_gpu.sort(key=lambda each: (each.gpu_count, each.vcpus))
        by = " or ".join(str(count) for count in dict.fromkeys(each.gpu_count for each in with_gpu))
        return UnavailableError(
            f"{asks}: EC2 sells machines with {by} {need.gpu.model} GPUs, and none of these fits.",
            hint=f"Ask for the GPUs, vCPUs and memory of one of them: {'; '.join(map(_described, with_gpu))}.",
        )
    if catalogue.is_shipped:
        return UnavailableError(
            f"{asks}: the list of instance types that comes with provisioner has none, and EC2 could not be asked.",
            hint="With credentials that may call ec2:DescribeInstanceTypes, provisioner uses all types that EC2 sells "
            "in the region. Or ask for other sizes in the manifest or an aux VM's spec.",
        )
    models = ", ".join(sorted({each.gpu_model for each in catalogue.types if each.gpu_model}))
    gpus = f" Its GPUs here are {models}." if need.gpu and models else ""
    return UnavailableError(
        f"{asks}: EC2 sells no such instance type here.{gpus}",
        hint="Ask for other sizes in the manifest or an aux VM's spec, or use another region.",
        settings=("region",),
    )


def _described(instance_type: InstanceType) -> str:
    gpus = f"{instance_type.gpu_count} {'GPU' if instance_type.gpu_count == 1 else 'GPUs'}"
    return f"{instance_type.name} ({gpus}, {instance_type.vcpus} vCPUs, {instance_type.memory_gib:g} GiB)"


def _fits(instance_type: InstanceType, need: Need) -> bool:
    if need.gpu:
        low, high = need.gpu.count_range
        gpu_fits = _is_model(instance_type, need.gpu) and low <= instance_type.gpu_count <= high
    else:
        gpu_fits = instance_type.gpu_model is None  # a machine with a part of a GPU has a model, and a count of 0
    return (
        gpu_fits
        and need.cpus[0] <= instance_type.vcpus <= need.cpus[1]
        and need.memory_gib[0] <= instance_type.memory_gib <= need.memory_gib[1]
        and need.architecture in (None, instance_type.architecture)
    )


def _is_model(instance_type: InstanceType, gpu: GpuSpec) -> bool:
    model = gpu.model.lower()
    return instance_type.gpu_model in GPU_NAMES.get(model, {model})


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
