"""What an environment would be and cost, before anything is built or created."""

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


def test_without_an_image_nobody_knows_permissions_and_aux_vm(
    session: Session, cloud: FakeCloud, tmp_path: Path
) -> None:
    told = forecast(session, family(tmp_path), "main")
    assert (told.image, told.full_internet, list(told.machines)) == (None, None, ["primary"])
    assert (told.cloud, told.region, told.family, told.task) == ("local", "crater", "fam", "main")
    assert cloud.runs() == []


def test_with_an_image_the_familys_own_word_counts(session: Session, cloud: FakeCloud, tmp_path: Path) -> None:
    fam = family(tmp_path)
    task = {"permissions": ["full_internet"], "aux_vm_spec": SPEC}
    cloud.guest_defaults = {"values": {"setup": {**SETUP, "tasks": {"main": task}}}}
    cloud.vendor_images = True
    planned = lifecycle.plan(session, fam, "main")
    runs = cloud.runs()
    told = forecast(session, fam, "main")
    assert told.image == planned.records["primary"].image
    assert told.full_internet is True
    assert told.machines == {role: record.size for role, record in planned.records.items()}
    assert cloud.runs() == runs
    with pytest.raises(UsageError, match="no task 'other'"):
        forecast(session, fam, "other")


def test_costs_are_those_of_the_whole_life_and_a_clean_up(session: Session, cloud: FakeCloud, tmp_path: Path) -> None:
    cloud.usd = Decimal(3)
    short = replace(session, ttl=timedelta(hours=1), builder_ttl=timedelta(hours=2))
    told = forecast(short, family(tmp_path), "main")
    assert (told.worst_micro_usd, told.builder_micro_usd) == (7_000_000, 13_000_000)
    assert told.limit_seconds == 3600
    assert [line.what for line in told.lines] == ["primary"]


def test_where_nobody_bills_nothing_costs(session: Session, tmp_path: Path) -> None:
    told = forecast(session, family(tmp_path), "main")
    assert (told.lines, told.worst_micro_usd, told.builder_micro_usd) == ((), 0, 0)


def test_the_disk_holds_the_familys_largest_task(session: Session, tmp_path: Path) -> None:
    manifest = "tasks: {main: {resources: {cpus: 2}}, large: {resources: {storage_gb: 99.5}}}"
    told = forecast(session, family(tmp_path, **{"manifest.yaml": manifest}), "main")
    assert (told.machines["primary"].cpus, told.machines["primary"].disk_gib) == (2, 100)
