"""Tests under which quota an instance type counts, and how many environments fit. tests/aws has the account."""

from __future__ import annotations

import pytest

from provisioner.clouds.aws.instances.vcpu_quota import Room, family, fitting, needs


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("t3.small", "Standard"),
        ("c7gn.16xlarge", "Standard"),
        ("im4gn.large", "Standard"),
        ("z1d.large", "Standard"),
        ("g4dn.xlarge", "G and VT"),
        ("gr6.4xlarge", "G and VT"),
        ("vt1.3xlarge", "G and VT"),
        ("p3.2xlarge", "P"),
        ("inf2.xlarge", "Inf"),
        ("trn1.2xlarge", "Trn"),
        ("x2idn.16xlarge", "X"),
        ("dl1.24xlarge", "DL"),
        ("f1.2xlarge", "F"),
        ("hpc6a.48xlarge", None),
        ("mac2.metal", None),
        ("u-6tb1.metal", None),
        ("", None),
    ],
)
def test_a_type_counts_under_the_quota_of_its_families(name: str, group: str | None) -> None:
    assert family(name) == group


def test_machines_count_by_quota() -> None:
    vcpus = {"t3.small": 2, "m5.large": 2, "g4dn.xlarge": 4}
    types = ["t3.small", "m5.large", "g4dn.xlarge", "u7.metal", "r99.new"]
    assert needs(types, vcpus) == {"Standard": 4, "G and VT": 4}


def test_the_scarcest_quota_decides() -> None:
    assert fitting([(4, Room(32, 10)), (8, Room(8, 0))]) == 1
    assert fitting([(4, Room(32, 40))]) == 0
    assert fitting([]) == 0
