"""Has a fake cloud sell EC2's machines at the shipped prices."""

from __future__ import annotations

from decimal import Decimal

import pytest

from provisioner.clouds.aws.catalogue import shipped
from provisioner.clouds.aws.instance_types import choose_builder, choose_machines
from provisioner.clouds.aws.sizing import cost_lines
from tests.unit.fakes.cloud import FakeCloud


def sell(cloud: FakeCloud, region: str, patch: pytest.MonkeyPatch) -> None:
    """Gives a cloud the catalogue of one of EC2's regions. Every machine gets the dearest type that was tried."""
    catalogue = shipped(region)
    patch.setattr(cloud, "choose", lambda resources, aux: choose_machines(resources, aux, catalogue))
    patch.setattr(
        cloud, "costs", lambda sizes, *, has_way_out, spot: cost_lines(sizes, catalogue, has_way_out=has_way_out)
    )
    patch.setattr(cloud, "builder_size", lambda base, disk_gib: choose_builder(base.architecture, disk_gib, catalogue))
    patch.setattr(cloud, "usd_per_hour", lambda environment: environment.worst_usd_per_hour or Decimal(0))
