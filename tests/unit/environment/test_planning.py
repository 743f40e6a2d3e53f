"""Tests the plan of an environment that has further machines beside a family's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from provisioner.clouds.local import sizing as local_sizing
from provisioner.environment import lifecycle, planning
from provisioner.errors import UnavailableError
from provisioner.family.loader import TaskFamily
from provisioner.session import Session
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.guest import SETUP
from tests.unit.fakes.world import family


def of_three(tmp_path: Path) -> TaskFamily:
    """Returns a family whose environments have two more machines, one of which needs another image."""
    families = {}
    for name in ("primary", "db", "web"):
        (tmp_path / name).mkdir()
        families[name] = family(tmp_path / name)
    (families["web"].directory / "more.txt").write_text("only here")
    web = replace(families["web"], files=(*families["web"].files, "more.txt"))
    return replace(families["primary"], hostname="box", neighbours={"db": families["db"], "web": web})


def test_further_machines_have_images_of_their_own_families(session: Session, tmp_path: Path) -> None:
    planned = planning.plan(session, of_three(tmp_path), "main")
    assert list(planned.records) == ["primary", "db", "web"]
    assert planned.records["primary"].hostname == "box"
    assert planned.records["db"].image == planned.records["primary"].image
    assert planned.records["web"].image != planned.records["primary"].image


def test_the_record_names_each_machines_base_image(session: Session, cloud: FakeCloud, tmp_path: Path) -> None:
    spec = {"cpu_count_range": [1, 2], "ram_gib_range": [1, 2]}
    cloud.guest_defaults = {"values": {"setup": {**SETUP, "tasks": {"main": {"aux_vm_spec": spec}}}}}
    fam = family(tmp_path, **{"manifest.yaml": "base_image: debian-13\ntasks: {}\n"})
    records = planning.plan(session, fam, "main").records
    assert {role: record.distribution for role, record in records.items()} == {
        "primary": "debian-13",
        "aux": "debian-12",
    }


def test_further_machines_go_with_the_first(session: Session, cloud: FakeCloud, tmp_path: Path) -> None:
    running = lifecycle.up(session, of_three(tmp_path), "main")
    assert sorted(cloud.existing()) == [f"{running.id}/{role}" for role in ("db", "primary", "web")]
    assert [running.role_of(name) for name in ("box", "primary", "web", "third")] == ["primary", "primary", "web", None]
    lifecycle.destroy(session, running)
    assert cloud.existing() == []


def test_a_machine_of_our_own_that_fails_is_named(
    session: Session, cloud: FakeCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    three = of_three(tmp_path)
    monkeypatch.setattr(cloud, "choose", local_sizing.choose_machines)
    monkeypatch.setattr(local_sizing, "_host_memory_gib", lambda: 0.5)
    with pytest.raises(UnavailableError) as raised:
        planning.plan(session, three, "main")
    assert str(raised.value).startswith("The machine box asks for 1 GiB of memory, and this host has 0.5 GiB")
    assert str(raised.value.hint).endswith("Or ask for less in memory_gb of the machine box.")
    with pytest.raises(UnavailableError, match="The primary machine asks") as raised:
        planning.plan(session, three.neighbours["db"], "main")
    assert str(raised.value.hint).endswith("memory_gb of the manifest.")


def test_machines_that_memory_has_no_room_for_are_refused(
    session: Session, cloud: FakeCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(cloud), "shortage", lambda *_: "no room")
    with pytest.raises(UnavailableError, match="no room") as raised:
        planning.plan(session, of_three(tmp_path), "main")
    assert "memory_gb of the machines" in str(raised.value.hint)
