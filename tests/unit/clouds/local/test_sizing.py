from __future__ import annotations

from pathlib import Path

import pytest

from provisioner.base.errors import UnavailableError
from provisioner.base.models import MachineSize, VMSpec
from provisioner.clouds.local.sizing import (
    available_memory_gib,
    check_machine_fits,
    check_machines_fit_together,
    fitting,
    memory_shortage,
    memory_text,
)
from provisioner.clouds.sizing import size_of_aux_vm

PAIR = [MachineSize(cpus=1, memory_gib=1, disk_gib=16), MachineSize(cpus=1, memory_gib=0.5, disk_gib=16)]


def test_what_the_host_can_give_passes() -> None:
    spec = VMSpec(cpu_count_range=(2, 4), ram_gib_range=(4, 8), cpu_architecture="x64")
    check_machine_fits(size_of_aux_vm(spec), host_memory_gib=4, host_cpus=2, spec=spec)


@pytest.mark.parametrize(
    ("size", "says"),
    [
        (MachineSize(cpus=1, memory_gib=9, disk_gib=16), "memory_gb of the manifest"),
        (MachineSize(cpus=33, memory_gib=1, disk_gib=16), "cpus of the manifest"),
    ],
)
def test_what_the_host_cannot_give_is_refused_with_a_way_out(size: MachineSize, says: str) -> None:
    with pytest.raises(UnavailableError) as caught:
        check_machine_fits(size, host_memory_gib=8, host_cpus=2)
    assert caught.value.hint is not None
    assert "the cloud aws" in caught.value.hint
    assert says in caught.value.hint


def test_machines_that_do_not_fit_together_are_refused() -> None:
    sizes = [MachineSize(cpus=1, memory_gib=5, disk_gib=16)] * 2
    check_machines_fit_together(sizes, host_memory_gib=10)
    with pytest.raises(UnavailableError, match=r"10 GiB of memory together, and this host has 8\.0 GiB"):
        check_machines_fit_together(sizes, host_memory_gib=8)


def test_cuda_is_refused_locally() -> None:
    spec = VMSpec(cpu_count_range=(1, 2), ram_gib_range=(2, 4), base_image_type="ubuntu-20.04-cuda")
    with pytest.raises(UnavailableError, match=r"ubuntu-20\.04-cuda"):
        check_machine_fits(size_of_aux_vm(spec), host_memory_gib=8, host_cpus=2, spec=spec)


def test_available_memory_is_read_from_the_kernel(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:  8388608 kB\nMemFree: 1 kB\nMemAvailable:    3145728 kB\n")
    assert available_memory_gib(tmp_path / "meminfo") == 3


@pytest.mark.parametrize(("available_gib", "fit"), [(0.2, 0), (1.4, 0), (1.5, 1), (7.4, 4), (7.5, 5), (7.9, 5)])
def test_environments_fit_if_all_memory_may_be_written(available_gib: float, fit: int) -> None:
    assert fitting(PAIR, available_gib) == fit
    assert memory_shortage(PAIR, fit, available_gib) == ""
    assert f"room for {fit} environments of 1.5 GiB" in memory_shortage(PAIR, fit + 1, available_gib)
    assert memory_text(PAIR, available_gib).startswith(
        f"up to 1.5 GiB of memory, of {available_gib} GiB available now: {fit} fit if each uses all"
    )
