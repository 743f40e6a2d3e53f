"""The local cloud as far as it goes without a machine."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pytest

from provisioner.base.config import Settings
from provisioner.base.errors import (
    CapacityError,
    HostError,
    InfrastructureError,
    TerraformError,
    UnavailableError,
    UsageError,
)
from provisioner.base.models import BaseImage, Environment, MachineRecord, MachineSize, TaskSetup
from provisioner.clouds.cloud import EnvironmentResources
from provisioner.clouds.local import host, machine
from provisioner.clouds.local.cloud import LocalCloud, LocalVariables
from provisioner.clouds.local.vm import disk, qemu
from provisioner.clouds.local.vm.processes import start_time
from provisioner.clouds.local.vm.qemu import PROCESS
from provisioner.family.manifest import Resources
from provisioner.store.home import Home
from tests.waiting import until

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
    (home.root / "kvm.json").write_text(json.dumps({"boot": host.BOOT_ID.read_text().strip(), "works": False}))
    return home


@pytest.fixture
def cloud(home: Home) -> LocalCloud:
    return LocalCloud(home, Settings())


PLANNING: dict[str, Callable[[LocalCloud], object]] = {
    "machines": lambda cloud: cloud.choose(Resources(), None),
    "builder": lambda cloud: cloud.builder_size(BaseImage(role="primary"), 16),
    "copy": lambda cloud: cloud.snapshot_needs(ENVIRONMENT),
}


@pytest.mark.parametrize("required", [True, False])
def test_a_host_that_may_not_emulate_and_cannot_do_else_is_not_ready(
    home: Home, monkeypatch: pytest.MonkeyPatch, required: bool
) -> None:
    monkeypatch.setattr(host, "problems", list)
    monkeypatch.setattr(host, "expects_kvm", lambda _: False)
    found = [problem for problem, _ in LocalCloud(home, Settings(require_kvm=required)).problems()]
    assert any("require_kvm refuses to emulate" in problem for problem in found) == required


@pytest.mark.parametrize("planning", PLANNING.values(), ids=PLANNING)
def test_no_emulated_machine_is_planned_where_the_settings_require_kvm(
    home: Home, planning: Callable[[LocalCloud], object]
) -> None:
    with pytest.raises(HostError, match="require_kvm"):
        planning(LocalCloud(home, Settings(require_kvm=True)))


def test_no_emulated_machine_is_planned_where_the_manifest_requires_kvm(cloud: LocalCloud) -> None:
    with pytest.raises(HostError, match="require_kvm") as refused:
        cloud.choose(Resources(require_kvm=True), None)
    assert (refused.value.exit_code, "doctor" in (refused.value.hint or "")) == (3, True)


@pytest.mark.parametrize("openable", [True, False], ids=["device", "none"])
def test_kvm_that_was_never_tried_is_refused_only_if_it_cannot_work(
    home: Home, monkeypatch: pytest.MonkeyPatch, openable: bool
) -> None:
    (home.root / "kvm.json").unlink()
    monkeypatch.setattr(host, "_openable", lambda: openable)
    planning = contextlib.nullcontext() if openable else pytest.raises(HostError)
    with planning:
        LocalCloud(home, Settings(require_kvm=True)).choose(Resources(), None)


def test_kvm_that_is_required_is_tried_with_the_kernel_of_any_image(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home.root / "kvm.json").unlink()
    (home.images / "base").mkdir()
    for name in ("image.json", "vmlinuz"):
        (home.images / "base" / name).touch()
    monkeypatch.setattr(host, "_openable", lambda: True)
    monkeypatch.setattr(host, "_boots", lambda _: False)
    with pytest.raises(HostError, match="require_kvm"):
        LocalCloud(home, Settings(require_kvm=True)).choose(Resources(), None)


@pytest.mark.parametrize(
    ("works", "says"), [(True, "KVM"), (False, "emulated"), (None, "not known yet")], ids=["kvm", "tcg", "untried"]
)
def test_a_plan_names_the_accelerator_as_it_was_tried(
    cloud: LocalCloud, home: Home, monkeypatch: pytest.MonkeyPatch, works: bool | None, says: str
) -> None:
    monkeypatch.setattr(host, "_openable", lambda: True)
    trial = {"boot": host.BOOT_ID.read_text().strip(), "works": works}
    (home.root / "kvm.json").write_text("" if works is None else json.dumps(trial))
    assert says in cloud.accelerator()


def test_the_accelerator_is_among_the_versions(cloud: LocalCloud) -> None:
    cloud.prepare(ENVIRONMENT, {"primary": {}})
    assert cloud.versions(ENVIRONMENT)["accelerator"] == "TCG"


def test_each_private_network_that_is_closed_is_probed(home: Home) -> None:
    opened = LocalCloud(home, Settings(private_networks=("10.0.0.0/16", "192.168.0.0/16")))
    assert opened.closed == ("10.255.255.254", "172.16.0.1", "172.31.255.254", "100.64.0.1", "100.127.255.254")


def test_a_prepared_machine_has_its_own_host_key_and_ttl(cloud: LocalCloud, home: Home) -> None:
    cloud.prepare(ENVIRONMENT, {"primary": {"agent": "ssh-ed25519 AAAA\n"}})
    directory = home.environments / "env" / "primary"
    assert (directory / "credentials" / "hostname").read_text() == "primary"
    assert (directory / "credentials" / "host_key").stat().st_mode & 0o077 == 0
    assert (directory / "accelerator").read_text() == "tcg"
    assert float((directory / "expires_at").read_text()) == ENVIRONMENT.expires_at.timestamp()
    assert (cloud.host_key(ENVIRONMENT, "primary") or "").startswith("ssh-ed25519 ")


@pytest.mark.parametrize(
    ("kind", "templates"), [("task", True), ("builder", True), ("task", False), ("builder", False)]
)
def test_machines_start_from_templates_unless_switched_off(home: Home, kind: str, templates: bool) -> None:
    planned = ENVIRONMENT.model_copy(update={"kind": kind})
    LocalCloud(home, Settings(templates=templates)).prepare(planned, {"primary": {}})
    assert (home.environments / "env" / "primary" / machine.WANTS_TEMPLATE).exists() is templates


def test_an_image_is_a_layer_over_its_base_image_alone(cloud: LocalCloud, home: Home) -> None:
    base = home.images / "image"
    base.mkdir()
    (base / "disk.raw").write_bytes(b"i" * (4 << 20))
    for name in ("vmlinuz", "initrd.img"):
        (base / name).touch()
    template = base / "template.qcow2"
    disk.create(template, base / "disk.raw")
    write_pattern(template, 1, "t")
    builder = home.environments / "env" / "primary"
    builder.mkdir(parents=True)
    disk.create(builder / disk.OVERLAY, template, 16)
    disk.note_below(builder, template)
    write_pattern(builder / disk.OVERLAY, 2, "b")
    finished = home.images / "finished"
    finished.mkdir()
    cloud.capture(ENVIRONMENT, "finished", finished)
    template.unlink()
    read = subprocess.run(
        ["qemu-io", "-c", "read -P 0x69 0 1M", "-c", "read -P 0x74 1M 1M", "-c", "read -P 0x62 2M 1M",
         "-c", "read -P 0x69 3M 1M", str(finished / "disk.qcow2")], check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert read.stdout.count("read 1048576/1048576 bytes") == 4
    assert "verification failed" not in read.stdout
    said = subprocess.run(
        ["qemu-img", "info", "--output=json", str(finished / "disk.qcow2")], check=True, capture_output=True
    )
    assert json.loads(said.stdout)["backing-filename"] == "../image/disk.raw"


def write_pattern(layer: Path, mib: int, letter: str) -> None:
    subprocess.run(
        ["qemu-io", "-c", f"write -P {ord(letter)} {mib}M 1M", str(layer)], check=True, stdout=subprocess.DEVNULL
    )


@pytest.mark.parametrize(
    ("memory_gib", "shares", "count"), [(0.5, 99, 0), (3.9, 99, 3), (99, 3.9, 3)], ids=["none", "memory", "disk"]
)
def test_a_hosts_room_is_its_available_memory_and_disk(
    cloud: LocalCloud, monkeypatch: pytest.MonkeyPatch, memory_gib: float, shares: float, count: int
) -> None:
    sizes = {role: record.size for role, record in ENVIRONMENT.machines.items()}
    free = disk.RESERVE_BYTES + int(shares * disk.share_bytes(16, 8))
    monkeypatch.setattr("provisioner.clouds.local.vm.disk.room", lambda _: disk.Room(free, 0))
    monkeypatch.setattr("provisioner.clouds.local.sizing.available_memory_gib", lambda: memory_gib)
    assert cloud.capacity(sizes) == count
    assert cloud.shortage(sizes, min(count, int(memory_gib))) == ""
    assert "not for" in cloud.shortage(sizes, int(memory_gib) + 1)


def test_a_disk_that_never_fits_is_refused_before_any_build(cloud: LocalCloud) -> None:
    assert cloud.choose(Resources(storage_gb=20), None)["primary"].disk_gib == 20
    with pytest.raises(UnavailableError, match=r"ask for 1000000000 GiB of disk.* no more than \d") as raised:
        cloud.choose(Resources(storage_gb=1_000_000_000), None)
    assert "storage_gb" in (raised.value.hint or "")


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


def test_a_machine_whose_qemu_is_stopped_stands_still(cloud: LocalCloud, home: Home) -> None:
    cloud.prepare(ENVIRONMENT, {"primary": {}})
    assert cloud.standstill(ENVIRONMENT, "primary") == ""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        note = home.environments / "env" / "primary" / PROCESS
        note.write_text(f"{process.pid} {start_time(process.pid)}")
        assert cloud.standstill(ENVIRONMENT, "primary") == ""
        process.send_signal(signal.SIGSTOP)
        until(lambda: "its QEMU is stopped" in cloud.standstill(ENVIRONMENT, "primary"))
        process.kill()


def test_a_survey_finds_directories_without_a_record(cloud: LocalCloud, home: Home) -> None:
    (home.environments / "lost").mkdir()
    [lost] = cloud.list_resources(None)
    assert (lost.environment, lost.home) == ("lost", home.identity)
    assert cloud.delete_resources(EnvironmentResources("lost"))
    assert cloud.list_resources(None) == []


def test_terraform_gets_the_directory_and_the_images_as_files(cloud: LocalCloud, home: Home) -> None:
    values = cloud.stack_values(ENVIRONMENT)
    assert values.images == {"primary": str(home.images / "image" / "disk.qcow2")}
    assert values.variables == LocalVariables(directory=str(home.environments / "env"))


def test_the_local_cloud_answers_by_defaults(cloud: LocalCloud, tmp_path: Path) -> None:
    sizes = {"primary": ENVIRONMENT.machines["primary"].size}
    assert cloud.costs(sizes, has_way_out=True, spot=False) == ()
    assert cloud.usd_per_hour(ENVIRONMENT) == Decimal(0)
    assert (cloud.region, cloud.place(ENVIRONMENT), cloud.fallback()) == ("", {}, None)
    assert cloud.next_place(ENVIRONMENT, TerraformError("InsufficientInstanceCapacity")) is None
    assert cloud.shared_network(ENVIRONMENT) is None
    assert cloud.impairment(ENVIRONMENT, "primary") == ""
    assert cloud.termination_reason(ENVIRONMENT, "primary").from_within is False
    assert (cloud.has_image(tmp_path), cloud.find_image("image", tmp_path)) == (True, False)


@pytest.fixture
def image(home: Home) -> Path:
    image = home.images / "image" / "disk.raw"
    image.parent.mkdir()
    image.write_bytes(b"a file system")
    return image


def test_a_copy_gets_its_snapshot_and_addresses(cloud: LocalCloud, home: Home) -> None:
    pair = {**ENVIRONMENT.machines, "aux": ENVIRONMENT.machines["primary"]}
    frozen = ENVIRONMENT.model_copy(update={"machines": pair})
    copy = frozen.model_copy(update={"id": "copy", "snapshot": "saved", "addresses_of": "env"})
    for each in (frozen, copy):
        cloud.prepare(each, {"primary": {}, "aux": {}})
    told = [home.environments / name / "aux" for name in ("env", "copy")]
    assert not (told[0] / machine.SNAPSHOT).exists()
    assert Path((told[1] / machine.SNAPSHOT).read_text()) == home.root / "snapshots" / "saved" / "aux"
    for name, alike in (("private_address", True), ("hosts", True), ("host_key", False)):
        values = {(directory / "credentials" / name).read_text() for directory in told}
        assert (len(values) == 1) is alike, name


def test_a_snapshot_needs_the_same_devices_and_images(
    cloud: LocalCloud, image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def differs() -> set[str]:
        return {name for name, value in cloud.snapshot_needs(ENVIRONMENT).items() if needs[name] != value}

    needs = cloud.snapshot_needs(ENVIRONMENT)
    assert (needs["accelerator"], needs["QEMU"][:4], differs()) == ("tcg", "QEMU", set())
    monkeypatch.setattr(qemu, "command", lambda launch, command=qemu.command: [*command(launch), "-device", "another"])
    assert differs() == {"the set of devices"}
    monkeypatch.undo()
    image.write_bytes(b"another system")
    assert differs() == {"image of the primary machine"}
    image.unlink()
    with pytest.raises(UsageError, match="image of the primary machine is gone"):
        cloud.snapshot_needs(ENVIRONMENT)


def test_nothing_is_frozen_without_room_or_without_a_machine(
    cloud: LocalCloud, home: Home, image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud.prepare(ENVIRONMENT, {"primary": {}})
    (tmp_path / "saved").mkdir()
    with pytest.raises(InfrastructureError, match="could not be frozen"):
        cloud.freeze(ENVIRONMENT, tmp_path / "saved")
    directory = home.environments / "env" / "primary"
    (directory / disk.OVERLAY).touch()
    disk.note_below(directory, image)
    monkeypatch.setattr(disk, "RESERVE_BYTES", 1 << 60)
    with pytest.raises(CapacityError, match=r"no room for a snapshot: it may take 1\.0 GiB"):
        cloud.freeze(ENVIRONMENT, tmp_path / "saved")
    assert list((tmp_path / "saved").iterdir()) == []
