"""Tests under which quota an instance type counts, and how many environments fit. tests/aws has the account."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from provisioner.base.models import MachineSize, Role
from provisioner.clouds.aws.sizing import AwsSizing
from provisioner.clouds.aws.vcpu_quota import Room, family, needs

ROLES: tuple[Role, ...] = ("primary", "aux")


@pytest.mark.parametrize(
    ("group", "names"),
    [
        ("Standard", ["t3.small", "c7gn.16xlarge", "im4gn.large", "z1d.large"]),
        ("G and VT", ["g4dn.xlarge", "gr6.4xlarge", "vt1.3xlarge"]),
        ("P", ["p3.2xlarge"]),
        ("Inf", ["inf2.xlarge"]),
        ("Trn", ["trn1.2xlarge"]),
        ("X", ["x2idn.16xlarge"]),
        ("DL", ["dl1.24xlarge"]),
        ("F", ["f1.2xlarge"]),
        (None, ["hpc6a.48xlarge", "mac2.metal", "u-6tb1.metal", ""]),
    ],
    ids=str,
)
def test_a_type_counts_under_the_quota_of_its_families(group: str | None, names: list[str]) -> None:
    assert {family(name) for name in names} == {group}


def test_machines_count_by_quota() -> None:
    vcpus = {"t3.small": 2, "m5.large": 2, "g4dn.xlarge": 4}
    types = ["t3.small", "m5.large", "g4dn.xlarge", "u7.metal", "r99.new"]
    assert needs(types, vcpus) == {"Standard": 4, "G and VT": 4}


def test_the_scarcest_quota_decides() -> None:
    quotas = {"Standard": Room(quota=32, used=10), "P": Room(quota=8, used=0)}
    sizing = AwsSizing()
    sizing.spot = False
    vars(sizing)["catalogue"] = SimpleNamespace(vcpus={"t3.small": 4, "p3.2xlarge": 8})
    vars(sizing)["quotas"] = SimpleNamespace(room=lambda group, _: quotas.get(group))

    def capacity(*types: str) -> int | None:
        sizes = [MachineSize(cpus=2, memory_gib=2, disk_gib=16, types=(name,)) for name in types]
        return sizing.capacity(dict(zip(ROLES, sizes, strict=False)))

    assert capacity("t3.small") == 5
    assert capacity("t3.small", "p3.2xlarge") == 1
    assert capacity("u7.metal") is None
    quotas["Standard"] = Room(quota=32, used=40)
    assert capacity("t3.small", "p3.2xlarge") == 0
