"""The local cloud as far as it goes without a machine."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pytest

from provisioner.clouds.cloud import EnvironmentResources
from provisioner.clouds.local import kvm, machine
from provisioner.clouds.local.cloud import LocalCloud, LocalVariables
from provisioner.config import Settings
from provisioner.errors import TerraformError
from provisioner.models import Environment, MachineRecord, MachineSize, TaskSetup
from provisioner.store.home import Home

NOW = datetime(2026, 1, 1, tzinfo=UTC)
ENVIRONMENT = Environment(
    id="env", cloud="local", stack="env", family="fam", task="main", status="creating", attended=True,
    created_at=NOW, expires_at=NOW + timedelta(hours=1), setup=TaskSetup(), full_internet=False,
    machines={"primary": MachineRecord(
        image="image", size=MachineSize(cpus=1, memory_gib=1, disk_gib=16), user="root"
    )},
)  # fmt: skip


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """A home on whose host KVM has been tried, and does not work."""
    home = Home(tmp_path)
    home.make()
    (home.root / "kvm.json").write_text(json.dumps({"boot": kvm.BOOT_ID.read_text().strip(), "works": False}))
    return home


@pytest.fixture
def cloud(home: Home) -> LocalCloud:
    return LocalCloud(home, Settings())


def test_a_prepared_machine_has_its_own_host_key_and_time_to_live(cloud: LocalCloud, home: Home) -> None:
    cloud.prepare(ENVIRONMENT, {"primary": {"agent": "ssh-ed25519 AAAA\n"}})
    directory = home.environments / "env" / "primary"
    assert (directory / "credentials" / "hostname").read_text() == "primary"
    assert (directory / "credentials" / "host_key").stat().st_mode & 0o077 == 0
    assert (directory / "accelerator").read_text() == "tcg"
    assert float((directory / "expires_at").read_text()) == ENVIRONMENT.expires_at.timestamp()
    assert (cloud.host_key(ENVIRONMENT, "primary") or "").startswith("ssh-ed25519 ")


@pytest.mark.parametrize(
    ("kind", "templates", "wants"), [("task", True, True), ("builder", True, False), ("task", False, False)]
)
def test_machines_of_tasks_start_from_templates_unless_the_operator_says_otherwise(
    home: Home, kind: str, templates: bool, wants: bool
) -> None:
    planned = ENVIRONMENT.model_copy(update={"kind": kind})
    LocalCloud(home, Settings(templates=templates)).prepare(planned, {"primary": {}})
    assert (home.environments / "env" / "primary" / machine.WANTS_TEMPLATE).exists() is wants


def test_the_time_to_live_moves_only_where_there_is_a_machine(cloud: LocalCloud, home: Home) -> None:
    later = ENVIRONMENT.model_copy(update={"expires_at": NOW + timedelta(hours=2)})
    cloud.move_ttl(later)
    assert cloud.remaining(ENVIRONMENT) == []
    cloud.prepare(ENVIRONMENT, {"primary": {}})
    cloud.move_ttl(later)
    assert float((home.environments / "env" / "primary" / "expires_at").read_text()) == later.expires_at.timestamp()


def test_what_remains_is_told_and_removed(cloud: LocalCloud, home: Home) -> None:
    cloud.prepare(ENVIRONMENT, {"primary": {}})
    assert not cloud.alive(ENVIRONMENT, "primary")
    assert cloud.remaining(ENVIRONMENT) == [f"directory {home.environments / 'env' / 'primary'}"]
    cloud.remove(ENVIRONMENT)
    assert cloud.remaining(ENVIRONMENT) == []


def test_a_survey_finds_directories_without_a_record(cloud: LocalCloud, home: Home) -> None:
    (home.environments / "lost").mkdir()
    [lost] = cloud.survey(None)
    assert (lost.environment, lost.home) == ("lost", home.identity)
    assert cloud.clear(EnvironmentResources("lost"))
    assert cloud.survey(None) == []


def test_terraform_gets_the_directory_and_the_images_as_files(cloud: LocalCloud, home: Home) -> None:
    values = cloud.stack_values(ENVIRONMENT)
    assert values.images == {"primary": str(home.images / "image" / "disk.qcow2")}
    assert values.variables == LocalVariables(directory=str(home.environments / "env"))


def test_what_the_local_cloud_has_not_is_answered_by_the_defaults(cloud: LocalCloud, tmp_path: Path) -> None:
    sizes = {"primary": ENVIRONMENT.machines["primary"].size}
    assert cloud.costs(sizes, full_internet=True, spot=False) == ()  # type: ignore[arg-type]
    assert cloud.usd_per_hour(ENVIRONMENT) == Decimal(0)
    assert (cloud.region, cloud.place(ENVIRONMENT), cloud.fallback()) == ("", {}, None)
    assert cloud.next_place(ENVIRONMENT, TerraformError("InsufficientInstanceCapacity")) is None
    assert (cloud.shared_network(ENVIRONMENT), cloud.root_files(ENVIRONMENT)) == (None, {})
    assert cloud.impairment(ENVIRONMENT, "primary") == ""
    assert cloud.termination_reason(ENVIRONMENT, "primary").from_within is False
    assert (cloud.has_image(tmp_path), cloud.adopt("image", tmp_path)) == (True, False)
