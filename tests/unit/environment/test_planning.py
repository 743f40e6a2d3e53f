"""Tests plans and estimates: the machines, images and costs of an environment before anything of it exists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from pathlib import Path

import pytest

from provisioner.base.clock import now
from provisioner.base.errors import HostError, UnavailableError, UsageError
from provisioner.base.models import MachineSize, Role, VMSpec
from provisioner.cli.commands.plan import per_thousand
from provisioner.clouds.local import sizing as local_sizing
from provisioner.costs.ledger import Entry
from provisioner.costs.prices import CostLine
from provisioner.environment import lifecycle, planning
from provisioner.environment.planning import forecast
from provisioner.family.check import Checked
from provisioner.family.loader import TaskFamily
from provisioner.family.manifest import Resources
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


def test_a_host_that_first_knows_after_the_build_that_it_lacks_kvm_refuses_all_the_same(
    session: Session, cloud: FakeCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = cloud.choose

    def refuse_once_built(resources: Resources, aux: VMSpec | None) -> dict[Role, MachineSize]:
        if resources.require_kvm and any(cloud.home.images.glob("*/setup-data.json")):
            raise HostError("No machine starts under KVM here.")
        return choose(resources, aux)

    monkeypatch.setattr(cloud, "choose", refuse_once_built)
    manifest = "tasks: {main: {resources: {require_kvm: true}}}\n"
    with pytest.raises(HostError):
        lifecycle.up(session, family(tmp_path, **{"manifest.yaml": manifest}), "main")
    assert (cloud.existing(), session.environments.all()) == ([], [])


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


SPEC = {"cpu_count_range": [2, 4], "ram_gib_range": [2, 4]}


def test_permissions_and_aux_vm_are_unknown_without_an_image(
    session: Session, cloud: FakeCloud, tmp_path: Path
) -> None:
    estimate = forecast(session, family(tmp_path), "main")
    assert (estimate.image, estimate.full_internet, list(estimate.machines)) == (None, None, ["primary"])
    assert (estimate.cloud, estimate.region, estimate.family, estimate.task) == ("local", "crater", "fam", "main")
    assert cloud.runs() == []


def test_the_estimate_names_the_base_image(session: Session, tmp_path: Path) -> None:
    newer = replace(session, base_image="debian-13")
    assert forecast(newer, family(tmp_path), "main").base_image == "debian-13"
    fam = family(tmp_path, **{"manifest.yaml": "base_image: debian-12\ntasks: {}\n"})
    assert forecast(newer, fam, "main").base_image == "debian-12"


def test_with_an_image_the_estimate_follows_the_setup_data(session: Session, cloud: FakeCloud, tmp_path: Path) -> None:
    fam = family(tmp_path)
    task = {"permissions": ["full_internet"], "aux_vm_spec": SPEC}
    cloud.guest_defaults = {"values": {"setup": {**SETUP, "tasks": {"main": task}}}}
    cloud.vendor_images = True
    planned = planning.plan(session, fam, "main")
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


def test_a_run_usually_costs_what_the_tasks_earlier_runs_did(
    session: Session, cloud: FakeCloud, tmp_path: Path
) -> None:
    cloud.usd = Decimal(3)
    short = replace(session, ttl=timedelta(hours=1))
    new = forecast(short, family(tmp_path), "main")
    assert (new.earlier_runs, new.usual_micro_usd) == (0, 3_500_000)  # the first place's price, for the whole ttl
    session.home.make()
    for name, task, kind, micro_usd in [
        ("a", "main", "task", 100_000), ("b", "main", "task", 300_001), ("c", "main", "task", 0),
        ("d", "other", "task", 900_000), ("e", "main", "builder", 900_000),
    ]:  # fmt: skip
        moment = now()
        entry = Entry(
            environment=name, kind=kind, cloud="local", region="", family="fam", task=task, batch="", project="p",
            command="c", launched_at=moment, expires_at=moment, reserved_micro_usd=10**6,
        )  # fmt: skip
        session.ledger.reserve(entry)
        session.ledger.settle(name, moment, micro_usd)
    again = forecast(short, family(tmp_path), "main")
    assert (again.earlier_runs, again.usual_micro_usd) == (2, 200_001)
    assert "1,000 runs: about 200.0010 USD, as this task's 2 earlier runs cost; at most 7000.0000 USD." in (
        per_thousand(again, "1h")
    )


def test_costs_name_the_aux_vm_that_they_do_not_include(session: Session, cloud: FakeCloud, tmp_path: Path) -> None:
    cloud.usd = Decimal(3)
    fam = family(tmp_path)
    assert forecast(session, fam, "main").not_included == "an aux VM: its size is known once the image is built"
    assert forecast(session, fam, "main", Checked("fam", has_aux_vm=False)).not_included == ""
    cloud.vendor_images = True
    planning.plan(session, fam, "main")  # builds the image, which says that there is none
    assert forecast(session, fam, "main").not_included == ""


def test_a_cloud_without_prices_costs_nothing(session: Session, tmp_path: Path) -> None:
    estimate = forecast(session, family(tmp_path), "main")
    assert (estimate.lines, estimate.worst_micro_usd, estimate.builder_micro_usd) == ((), 0, 0)


def test_the_disk_fits_the_familys_largest_task(session: Session, tmp_path: Path) -> None:
    manifest = "tasks: {main: {resources: {cpus: 2}}, large: {resources: {storage_gb: 99.5}}}"
    estimate = forecast(session, family(tmp_path, **{"manifest.yaml": manifest}), "main")
    assert (estimate.machines["primary"].cpus, estimate.machines["primary"].disk_gib) == (2, 100)


def test_an_allowlist_is_a_way_out_that_is_paid_for(
    session: Session, cloud: FakeCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fam = family(tmp_path)
    cloud.vendor_images = True
    planning.plan(session, fam, "main")  # builds the image, which says that the task is offline
    asked: list[bool] = []
    costs = cloud.costs

    def note(sizes: Mapping[Role, MachineSize], *, has_way_out: bool, spot: bool) -> tuple[CostLine, ...]:
        asked.append(has_way_out)
        return costs(sizes, has_way_out=has_way_out, spot=spot)

    monkeypatch.setattr(cloud, "costs", note)
    forecast(session, fam, "main")
    forecast(session, fam, "main", allowlist=True)
    assert asked[::2] == [False, True]  # the second of each is the builder's
