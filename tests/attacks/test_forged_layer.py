"""An attacker that has taken QEMU over makes something else of the machine's disk, before the environment is frozen.

The copies' disks lie over it, and the controller's programs open it: it must lead to no other file of the host, and
reading it must come to an end. A builder's disk becomes an image, over which all machines of its family lie.
"""

from __future__ import annotations

import contextlib
import random
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from provisioner.base.config import Settings
from provisioner.base.errors import ImageBuildError, InfrastructureError
from provisioner.base.progress import Silence
from provisioner.clouds.local.cloud import LocalCloud
from provisioner.clouds.local.frozen import snapshots, templates
from provisioner.clouds.local.images import BOOT_FILES
from provisioner.clouds.local.vm import machine_logs
from provisioner.clouds.local.vm.disk import (
    UntrustworthyLayerError,
    chain,
    create,
    note_below,
    put_over,
    require_plain,
)
from provisioner.clouds.local.vm.qemu import Launch
from provisioner.store.home import Home
from provisioner.store.images import ImageStore
from tests.unit.fakes.world import environment

MIB = 1 << 20
# Offsets in the header (QEMU's docs/interop/qcow2.txt).
VERSION, SIZE, ENCRYPTION, TABLES, INCOMPATIBLE = 4, 24, 32, 40, 72


@pytest.fixture
def image(tmp_path: Path) -> Path:
    image = tmp_path / "image.raw"
    image.write_bytes(b"i" * MIB)
    return image


@pytest.fixture
def layer(tmp_path: Path, image: Path) -> Path:
    layer = tmp_path / "layer.qcow2"
    create(layer, image)
    return layer


def forge(layer: Path, offset: int, data: bytes) -> None:
    with layer.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def forge_data_file(layer: Path) -> None:
    """Makes a disk whose data are those of another file of the host."""
    secret = layer.with_name("secret")
    options = f"data_file={secret},data_file_raw=on"
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", "-o", options, str(layer), "1M"], check=True)
    secret.write_bytes(b"s" * MIB)


def test_a_layer_whose_data_is_another_file_is_refused(tmp_path: Path, image: Path) -> None:
    layer = tmp_path / "layer.qcow2"
    forge_data_file(layer)
    with pytest.raises(UntrustworthyLayerError):
        put_over(layer, image, image, 1)


@pytest.mark.parametrize(
    ("offset", "data"),
    [
        (0, b"\x7fELF"),
        (VERSION, struct.pack(">I", 2)),
        (SIZE, struct.pack(">Q", (1 << 30) + 1)),
        (ENCRYPTION, struct.pack(">I", 2)),
        *((INCOMPATIBLE, struct.pack(">Q", 1 << bit)) for bit in (1, 2, 3, 4, 63)),
    ],
    ids=["magic", "version", "size", "encrypted", "corrupt", "data-file", "compression", "subclusters", "unknown"],
)
def test_a_layer_of_another_kind_is_refused(layer: Path, offset: int, data: bytes) -> None:
    require_plain(layer, 1)
    forge(layer, offset, data)
    with pytest.raises(UntrustworthyLayerError):
        require_plain(layer, 1)


def break_tables(layer: Path) -> None:
    """Makes a disk whose header begins as it should, and whose tables lie where none can."""
    create(layer, None, 1)
    forge(layer, TABLES, struct.pack(">Q", 1))


class Obedient:
    """Stands in for the control connection of a QEMU that an attacker has taken over."""

    def execute(self, command: str) -> None:
        assert command == "stop"


@pytest.mark.parametrize("spoil", [forge_data_file, break_tables], ids=["data-file", "tables"])
@pytest.mark.parametrize("kept", ["image", "layer"])
def test_a_builders_disk_that_qemu_did_not_make_is_refused(
    tmp_path: Path, spoil: Callable[[Path], None], kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "held", lambda _: contextlib.nullcontext(Obedient()))
    home = Home(tmp_path / "home")
    home.make()
    builder = environment(kind="builder")
    directory = home.environments / builder.id / "primary"
    directory.mkdir(parents=True)
    base = ImageStore(home).path(builder.machines["primary"].image)
    base.mkdir()
    (base / "disk.raw").write_bytes(b"i" * MIB)
    for name in BOOT_FILES:
        (base / name).touch()
    note_below(directory, base / "disk.raw")
    spoil(directory / "disk.qcow2")
    cloud = LocalCloud(home, Settings())

    def keep() -> None:
        with ImageStore(home).building("new", Silence()) as made:
            assert made
            if kept == "image":
                cloud.capture(builder, "new", made)
            else:
                cloud.keep_layer(builder, made)

    # Without a layer a build continues; what it captures at its end is looked at again.
    refused = (ImageBuildError,) if kept == "image" else (ImageBuildError, InfrastructureError)
    with pytest.raises(refused, match=r"builder's disk (is not used|could not be copied)"):
        keep()
    assert [path.name for path in home.images.iterdir()] == [base.name]


def name_secret_below(layer: Path) -> None:
    secret = layer.parent.parent / "secret.raw"
    secret.write_bytes(b"s" * MIB)
    create(layer, secret)


@pytest.mark.parametrize(
    "spoil", [forge_data_file, break_tables, name_secret_below], ids=["data-file", "tables", "name"]
)
def test_a_template_is_over_its_image_or_is_refused(
    tmp_path: Path, image: Path, spoil: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an image's build has left in it takes over the QEMU in which a template boots."""

    @contextlib.contextmanager
    def running(_: Launch, directory: Path, layer: str, __: float) -> Iterator[tuple[Mock, Mock]]:
        spoil(directory / layer)
        for part in (templates.MEMORY, templates.STATE, machine_logs.SERIAL):
            (directory / part).parent.mkdir(exist_ok=True)
            (directory / part).touch()
        yield Mock(), Mock()

    monkeypatch.setattr(templates, "running", running)
    for name in ("_wait_for_question", "write_state"):
        monkeypatch.setattr(templates, name, Mock())
    for name in BOOT_FILES:
        (tmp_path / name).touch()
    kernel, initrd = (str(tmp_path / name) for name in BOOT_FILES)
    launch = Launch(1, 0, kernel, initrd, kvm=False, link=(), internet_fd=None, user=None)
    with contextlib.suppress(templates.TemplateError):
        made = templates.obtain(image, launch, Mock())
        assert spoil is name_secret_below
        assert chain(made.disk) == [made.disk, image]


def test_a_layer_too_large_for_any_program_is_refused(tmp_path: Path, image: Path) -> None:
    lower, layer = tmp_path / "lower.qcow2", tmp_path / "layer.qcow2"
    create(lower, image)
    create(layer, lower)
    size, cluster = 1 << 50, 1 << 16
    table = (layer.stat().st_size + cluster - 1) // cluster * cluster
    entries = size // (cluster * cluster // 8)  # all empty, and a hole on the disk
    forge(layer, SIZE, struct.pack(">Q", size))
    forge(layer, SIZE + 12, struct.pack(">IQ", entries, table))
    with layer.open("r+b") as file:
        file.truncate(table + entries * 8)
    with pytest.raises(UntrustworthyLayerError):
        put_over(layer, lower, image, 16)  # for which qemu-img would take days


@pytest.mark.parametrize("size", [0, 3, 79])
def test_a_layer_that_is_cut_off_is_refused(layer: Path, size: int) -> None:
    layer.write_bytes(layer.read_bytes()[:size])
    with pytest.raises(UntrustworthyLayerError):
        require_plain(layer, 1)


def test_a_damaged_layer_is_an_error_in_a_bounded_time(layer: Path, image: Path, tmp_path: Path) -> None:
    lower = tmp_path / "lower.qcow2"
    create(lower, image)
    whole, dice = layer.read_bytes(), random.Random(7)
    for _ in range(10):
        damaged = bytearray(whole)
        for _ in range(20):
            damaged[dice.randrange(len(damaged))] = dice.randrange(256)
        layer.write_bytes(damaged)
        try:
            put_over(layer, lower, image, 1)
        except (OSError, subprocess.SubprocessError):
            continue
