"""From what a machine asks for to the cheapest instance type."""

from __future__ import annotations

from datetime import date
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provisioner.base.errors import UnavailableError
from provisioner.base.models import GpuSpec, VMSpec
from provisioner.clouds.aws.catalogue import shipped
from provisioner.clouds.aws.instance_types import (
    Catalogue,
    InstanceType,
    Need,
    cheapest,
    choose_builder,
    choose_machines,
)
from provisioner.costs.prices import Price
from provisioner.family.manifest import Resources

MARKET = shipped("us-east-1")


def spec(**changes: object) -> VMSpec:
    return VMSpec.model_validate({"cpu_count_range": (2, 4), "ram_gib_range": (4, 8), **changes})


def aux(**changes: object) -> tuple[str, str]:
    """The architecture and the first type that a spec leads to."""
    size = choose_machines(Resources(), spec(**changes), MARKET)["aux"]
    return size.architecture, size.types[0]


def market(*types: InstanceType, **usd: int) -> Catalogue:
    """A catalogue with some prices in cents; those of zero are none."""
    prices = {
        name: Price(usd=Decimal(cents) / 100, source="tests", as_of=date(2026, 11, 1))
        for name, cents in usd.items()
        if cents
    }
    return Catalogue(types=types, prices=prices)


def test_an_architecture_left_open_means_the_cheaper() -> None:
    assert aux() == ("arm64", "t4g.medium")
    assert aux(cpu_architecture="x64") == ("x64", "t3a.medium")
    assert aux(cpu_architecture="arm64") == ("arm64", "t4g.medium")


def test_alternatives_share_the_architecture_and_grow_dearer() -> None:
    size = choose_machines(Resources(), spec(cpu_count_range=(2, 16), ram_gib_range=(4, 64)), MARKET)["aux"]
    by_name = {one.name: one for one in MARKET.types}
    assert {by_name[name].architecture for name in size.types} == {"arm64"}
    prices = [MARKET.hourly_usd[name] for name in size.types]
    assert prices == sorted(prices)
    assert len(prices) > 2


def gpu(model: str, *count: int, **changes: object) -> tuple[str, str]:
    """The architecture and the first type for a number of GPUs, in a machine of any size."""
    spec = {"model": model, "count_range": (count[0], count[-1])}
    return aux(gpu_spec=spec, cpu_count_range=(1, 192), ram_gib_range=(1, 2048), **changes)


@pytest.mark.parametrize(
    ("model", "count", "name"),
    [
        ("t4", (1, 1), "g4dn.xlarge"), ("T4", (4, 4), "g4dn.12xlarge"), ("a10", (1, 2), "g5.xlarge"),
        ("H100", (1, 1), "p5.4xlarge"),
    ],
)  # fmt: skip
def test_a_gpu_is_found_by_model_and_count(model: str, count: tuple[int, int], name: str) -> None:
    assert gpu(model, *count) == ("x64", name)


@pytest.mark.parametrize("model", ["t4", "a10", "l4", "l40s", "a100", "h100", "h200", "B200"])
def test_the_shipped_list_has_each_gpu(model: str) -> None:
    assert gpu(model, 1, 8)[1]
    if model in ("t4", "a10"):  # as the CUDA image's driver knows
        assert gpu(model, 1, base_image_type="ubuntu-20.04-cuda")[1]


@pytest.mark.parametrize("model", ["v100", "V100", "k80"])
def test_a_gpu_that_the_cuda_image_has_no_driver_for_is_refused(model: str) -> None:
    asked = spec(gpu_spec={"model": model, "count_range": (1, 1)}, cpu_count_range=(1, 96), ram_gib_range=(1, 768))
    sold = InstanceType(
        name="p3dn.24xlarge", vcpus=96, memory_gib=768, architecture="x64", gpu_model=model.lower(), gpu_count=1
    )
    prices = MARKET.prices | market(**{sold.name: 3100}).prices
    sells = Catalogue(types=(*MARKET.types, sold), prices=prices)
    cuda = asked.model_copy(update={"base_image_type": "ubuntu-20.04-cuda"})
    with pytest.raises(UnavailableError, match=f"asks for {model} with ubuntu-20.04-cuda") as caught:
        choose_machines(Resources(), cuda, sells)
    assert "t4, a10 or a100" in (caught.value.hint or "")
    assert caught.value.exit_code == 2
    # Where the operator installs a driver, it is theirs to choose.
    assert choose_machines(Resources(), asked, sells)["aux"].types == ("p3dn.24xlarge",)


def test_the_shipped_types_are_nitro() -> None:
    assert not {one.name.split(".")[0] for one in MARKET.types} & {"p2", "p3", "g3", "t2", "m4", "c4", "r4"}


def test_a_machine_without_gpu_gets_none() -> None:
    types = choose_machines(Resources(), spec(cpu_count_range=(4, 4), ram_gib_range=(16, 16)), MARKET)["aux"].types
    assert not any(name.startswith(("g", "p")) for name in types)


def test_the_primary_machine_is_x64_and_large_enough() -> None:
    size = choose_machines(Resources(cpus=3, memory_gb=20, storage_gb=40), None, MARKET)["primary"]
    assert (size.architecture, size.disk_gib) == ("x64", 40)
    assert size.cpus >= 3
    assert size.memory_gib >= 20
    assert choose_machines(Resources(), None, MARKET)["primary"].types[0] == "t3a.micro"


def test_a_builder_is_of_the_images_architecture() -> None:
    assert choose_builder("arm64", 16, MARKET).types[0] == "t4g.medium"
    assert choose_builder("x64", 30, MARKET).disk_gib == 30


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"cpu_count_range": (3, 3)}, "comes with provisioner has none, and EC2 could not be asked"),
        ({"gpu_spec": {"model": "h100", "count_range": (1, 1)}}, "1 h100 GPUs"),
        ({"ram_gib_range": (5, 6)}, "5 to 6 GiB"),
    ],
)
def test_what_the_shipped_list_lacks_is_refused_in_words(wanted: dict[str, object], said: str) -> None:
    with pytest.raises(UnavailableError, match=said):
        aux(**wanted)


def test_a_gpu_sold_by_eight_names_the_machines() -> None:
    with pytest.raises(UnavailableError, match="EC2 sells machines with 8 a100 GPUs, and none of these fits") as caught:
        gpu("a100", 1)
    assert "p4d.24xlarge (8 GPUs, 96 vCPUs, 1152 GiB)" in (caught.value.hint or "")


def test_ec2s_own_list_is_complete() -> None:
    unknown = GpuSpec(model="x9000", count_range=(1, 1))
    with pytest.raises(UnavailableError, match=r"EC2 sells no such instance type here\. Its GPUs here are a100, a10g"):
        cheapest(Need(cpus=(1, 4), memory_gib=(1, 8), gpu=unknown), "aux VM", market(*MARKET.types))


def test_a_part_of_a_gpu_is_no_machine_without_gpu() -> None:
    part = InstanceType(name="g6f", vcpus=2, memory_gib=8, architecture="x64", gpu_model="l4")
    with pytest.raises(UnavailableError):
        cheapest(Need(cpus=(1, 4), memory_gib=(1, 8)), "aux VM", market(part, g6f=1))


def test_an_unknown_price_is_never_taken_for_none() -> None:
    one = InstanceType(name="free.large", vcpus=2, memory_gib=4, architecture="x64")
    with pytest.raises(UnavailableError, match="no price is known"):
        cheapest(Need(cpus=(1, 4), memory_gib=(1, 8)), "aux VM", market(one))
    with pytest.raises(UnavailableError, match="no price is known"):
        choose_machines(Resources(), None, shipped("eu-nowhere-1"))


TYPES = st.builds(
    InstanceType,
    name=st.text("abc", min_size=1, max_size=6),
    vcpus=st.integers(1, 64),
    memory_gib=st.integers(1, 256).map(float),
    architecture=st.sampled_from(["x64", "arm64"]),
    gpu_count=st.integers(0, 4),
).map(lambda each: each.model_copy(update={"gpu_model": "t4" if each.gpu_count else None}))


@given(st.lists(TYPES, max_size=20, unique_by=lambda one: one.name), st.data())
def test_what_is_chosen_fits_and_nothing_that_fits_is_cheaper(types: list[InstanceType], data: st.DataObject) -> None:
    cents = {one.name: data.draw(st.integers(0, 500)) for one in types}
    low, high = sorted(data.draw(st.tuples(st.integers(1, 64), st.integers(1, 64))))
    asked = data.draw(st.sampled_from([None, GpuSpec(model="T4", count_range=(1, 2))]))
    need = Need(cpus=(low, high), memory_gib=(1, 256), gpu=asked)
    fitting = [
        one for one in types
        if low <= one.vcpus <= high and cents[one.name] > 0
        and (1 <= one.gpu_count <= 2 if asked else one.gpu_count == 0)
    ]  # fmt: skip
    try:
        chosen = cheapest(need, "aux VM", market(*types, **cents))
    except UnavailableError:
        assert not fitting
    else:
        assert {one.name for one in chosen} == {one.name for one in fitting}
        assert cents[chosen[0].name] == min(cents[one.name] for one in fitting)


def test_a_catalogue_survives_being_kept() -> None:
    assert Catalogue.model_validate_json(MARKET.model_dump_json()) == MARKET
