"""Tests the estimate of an environment's machines and costs, made before anything is built or created."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from pathlib import Path

import pytest

from provisioner.environment import lifecycle
from provisioner.environment.estimate import forecast
from provisioner.errors import UsageError
from provisioner.session import Session
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.guest import SETUP
from tests.unit.fakes.world import family

SPEC = {"cpu_count_range": [2, 4], "ram_gib_range": [2, 4]}


def test_permissions_and_aux_vm_are_unknown_without_an_image(
    session: Session, cloud: FakeCloud, tmp_path: Path
) -> None:
    estimate = forecast(session, family(tmp_path), "main")
    assert (estimate.image, estimate.full_internet, list(estimate.machines)) == (None, None, ["primary"])
    assert (estimate.cloud, estimate.region, estimate.family, estimate.task) == ("local", "crater", "fam", "main")
    assert cloud.runs() == []


def test_with_an_image_the_estimate_follows_the_setup_data(session: Session, cloud: FakeCloud, tmp_path: Path) -> None:
    fam = family(tmp_path)
    task = {"permissions": ["full_internet"], "aux_vm_spec": SPEC}
    cloud.guest_defaults = {"values": {"setup": {**SETUP, "tasks": {"main": task}}}}
    cloud.vendor_images = True
    planned = lifecycle.plan(session, fam, "main")
    runs = cloud.runs()
    estimate = forecast(session, fam, "main")
    assert estimate.image == planned.records["primary"].image
    assert estimate.full_internet is True
    assert estimate.machines == {role: record.size for role, record in planned.records.items()}
    assert cloud.runs() == runs
    with pytest.raises(UsageError, match="no task 'other'"):
        forecast(session, fam, "other")


def test_costs_cover_the_time_to_live_and_the_clean_up(session: Session, cloud: FakeCloud, tmp_path: Path) -> None:
    cloud.usd = Decimal(3)
    short = replace(session, ttl=timedelta(hours=1), builder_ttl=timedelta(hours=2))
    estimate = forecast(short, family(tmp_path), "main")
    assert (estimate.worst_micro_usd, estimate.builder_micro_usd) == (7_000_000, 13_000_000)
    assert estimate.limit_seconds == 3600
    assert [line.what for line in estimate.lines] == ["primary"]


def test_a_cloud_without_prices_costs_nothing(session: Session, tmp_path: Path) -> None:
    estimate = forecast(session, family(tmp_path), "main")
    assert (estimate.lines, estimate.worst_micro_usd, estimate.builder_micro_usd) == ((), 0, 0)


def test_the_disk_fits_the_familys_largest_task(session: Session, tmp_path: Path) -> None:
    manifest = "tasks: {main: {resources: {cpus: 2}}, large: {resources: {storage_gb: 99.5}}}"
    estimate = forecast(session, family(tmp_path, **{"manifest.yaml": manifest}), "main")
    assert (estimate.machines["primary"].cpus, estimate.machines["primary"].disk_gib) == (2, 100)
