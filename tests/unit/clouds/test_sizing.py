from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provisioner.base.errors import UnavailableError
from provisioner.base.models import GpuSpec, MachineSize, VMSpec
from provisioner.clouds.sizing import size_of_aux_vm, size_of_primary, smallest_size
from provisioner.family.manifest import Resources

GPU = GpuSpec(count_range=(1, 1), model="h100")


@pytest.mark.parametrize(
    ("cpus", "memory", "expected"),
    [
        ((1, 1), (1, 1), (1, 1)),
        ((0.5, 4), (0.5, 4), (1, 0.5)),
        ((1.2, 8), (1.5, 64), (2, 1.5)),
        ((2, 2.5), (0.25, 2), (2, 0.5)),
        ((16, 16), (3.7, 4), (16, 3789 / 1024)),
    ],
)
def test_the_smallest_machine_inside_the_ranges_is_chosen(
    cpus: tuple[float, float], memory: tuple[float, float], expected: tuple[int, float]
) -> None:
    size = smallest_size(cpus, memory)
    assert (size.cpus, size.memory_gib, size.disk_gib) == (*expected, 16)


RANGE = st.tuples(st.floats(0.01, 512), st.floats(0, 64)).map(lambda ends: (ends[0], ends[0] + ends[1]))


@given(RANGE, RANGE)
def test_a_size_lies_inside_both_ranges_and_nothing_smaller_does(
    cpus: tuple[float, float], memory: tuple[float, float]
) -> None:
    try:
        size = smallest_size(cpus, memory)
    except UnavailableError:
        return
    assert cpus[0] <= size.cpus <= cpus[1]
    assert memory[0] <= size.memory_gib <= memory[1]
    assert size.cpus == 1 or size.cpus - 1 < cpus[0]
    assert size.memory_gib == 0.5 or size.memory_gib - 1 / 1024 < memory[0]
    assert (size.memory_gib * 1024).is_integer()


@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        (Resources(), MachineSize(cpus=1, memory_gib=1, disk_gib=16)),
        (
            Resources(cpus=0.25, memory_gb=0.1, storage_gb=0.5),
            MachineSize(cpus=1, memory_gib=0.5, disk_gib=16),
        ),
        (Resources(cpus=2.5, memory_gb=3, storage_gb=20.1), MachineSize(cpus=3, memory_gib=3, disk_gib=21)),
    ],
)
def test_a_primary_machine_has_its_manifests_size_rounded_up(resources: Resources, expected: MachineSize) -> None:
    assert size_of_primary(resources) == expected


def test_an_aux_vm_with_cuda_has_a_larger_disk() -> None:
    debian = VMSpec(cpu_count_range=(1, 2), ram_gib_range=(2, 4))
    cuda = debian.model_copy(update={"base_image_type": "ubuntu-20.04-cuda", "gpu_spec": GPU})
    assert (size_of_aux_vm(debian).disk_gib, size_of_aux_vm(cuda).disk_gib) == (16, 125)
