"""Tests that images are complete or absent, built only once, and kept as long as something needs them."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest

from provisioner.base.clock import now
from provisioner.base.errors import HostError, InfrastructureError, UsageError
from provisioner.base.models import BaseImage
from provisioner.base.progress import Silence
from provisioner.store import images
from provisioner.store.files import locked
from provisioner.store.home import TEMPLATES, UNFINISHED, Home
from provisioner.store.images import MAXIMUM_PACKAGES, Image, ImageStore, Kind, installed_packages
from tests.waiting import BOUND_SECONDS

PROCESSES = multiprocessing.get_context("spawn")


@pytest.fixture
def home(tmp_path: Path) -> Home:
    new = Home(tmp_path / "home")
    new.make()
    return new


def build(home: Home, name: str, seconds: float = 0, started: Event | None = None) -> None:
    """Builds an image as its users do, and notes each build in a file."""
    store = ImageStore(home)
    with store.building(name, Silence()) as directory:
        if directory is None:
            return
        with (home.root / "builds").open("a") as builds:
            builds.write(f"{name}\n")
        (directory / "disk.qcow2").write_bytes(b"x" * 5000)
        if started:
            started.set()
        time.sleep(seconds)
        store.finish(Image(name=name, kind="family", created_at=now(), family="fam"), directory)


def add(home: Home, name: str, kind: Kind, family: str | None = None, base: str | None = None, **more: Any) -> None:
    store = ImageStore(home)
    with store.building(name, Silence()) as directory:
        assert directory
        store.finish(Image(name=name, kind=kind, created_at=now(), base=base, family=family, **more), directory)


def prune(home: Home, *in_use: str, everything: bool = False) -> list[str]:
    return ImageStore(home).prune(set(in_use), cloud="local", discard=lambda _: None, everything=everything)


def test_two_simultaneous_builds_of_an_image_build_it_once(home: Home) -> None:
    builders = [PROCESSES.Process(target=build, args=(home, "family-a-1", 0.5)) for _ in range(3)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join(BOUND_SECONDS)
        assert builder.exitcode == 0
    assert (home.root / "builds").read_text() == "family-a-1\n"
    assert ImageStore(home).finished("family-a-1")


def test_a_killed_builds_remains_are_replaced(home: Home) -> None:
    started = PROCESSES.Event()
    builder = PROCESSES.Process(target=build, args=(home, "family-a-1", 60, started))
    builder.start()
    assert started.wait(BOUND_SECONDS)
    store = ImageStore(home)
    assert not store.finished("family-a-1")
    assert store.all() == []
    assert prune(home) == []  # another process builds it
    assert builder.pid is not None
    os.kill(builder.pid, signal.SIGKILL)
    builder.join()
    assert store.all() == []
    build(home, "family-a-1")
    assert [image.name for image in store.all()] == ["family-a-1"]
    assert [path.name for path in home.images.iterdir()] == ["family-a-1"]


def test_prune_removes_the_remains_of_a_killed_build(home: Home) -> None:
    (home.images / ".building-family-a-1").mkdir()
    assert prune(home) == [".building-family-a-1"]
    assert list(home.images.iterdir()) == []


def test_prune_removes_abandoned_templates_only(home: Home) -> None:
    build(home, "family-a-1")
    templates = home.images / "family-a-1" / "templates"
    for name in (".building-dead", ".building-alive", "whole"):
        (templates / name).mkdir(parents=True)
        (templates / name / "memory").touch()
    (templates / "dead.lock").touch()
    (templates / ".building-other.lock").touch()
    with locked(templates / "alive.lock"):
        assert prune(home, "family-a-1") == ["family-a-1/templates/.building-dead"]
    assert (templates / ".building-other.lock").exists()
    assert {path.name for path in templates.iterdir() if path.is_dir()} == {".building-alive", "whole"}


def test_an_image_goes_with_its_templates_which_count_as_its_own(home: Home) -> None:
    build(home, "family-a-1")
    store = ImageStore(home)
    alone = store.disk_bytes("family-a-1")
    template = home.images / "family-a-1" / "templates" / "whole"
    template.mkdir(parents=True)
    (template / "memory").write_bytes(b"x" * 65536)
    assert store.disk_bytes("family-a-1") == alone + 65536
    assert prune(home, everything=True) == ["family-a-1"]
    assert list(home.images.iterdir()) == []


def test_a_failed_build_leaves_only_its_log(home: Home) -> None:
    def fail() -> None:
        with ImageStore(home).building("base-1", Silence()) as directory:
            assert directory
            (directory / "build.log").write_text("what it said")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert list(home.images.iterdir()) == []
    assert (home.archive / "base-1.build.log").read_text() == "what it said"


def test_the_newest_base_image_of_each_distribution_stays(home: Home) -> None:
    kinds = [BaseImage(role="primary", distribution=each) for each in ("debian-12", "debian-13")]
    for number in (1, 2):
        for kind in kinds:
            add(home, f"{kind.label}-{number}", "base")
    removed = prune(home)
    assert sorted(removed) == ["base-primary-1", "base-primary-debian-13-1"]


def test_prune_keeps_images_that_are_newest_in_use_or_needed(home: Home) -> None:
    add(home, "base-primary-1", "base")
    add(home, "base-primary-2", "base")
    add(home, "aux-a-1", "aux", "a", "base-primary-1")
    add(home, "aux-a-2", "aux", "a", "base-primary-2")
    add(home, "family-a-1", "family", "a", "base-primary-1", needs=("aux-a-1",))
    add(home, "family-a-2", "family", "a", "base-primary-2", needs=("aux-a-2",))
    store = ImageStore(home)
    assert prune(home, "family-a-1") == []
    assert sorted(prune(home)) == ["aux-a-1", "base-primary-1", "family-a-1"]
    assert sorted(image.name for image in store.all()) == ["aux-a-2", "base-primary-2", "family-a-2"]
    assert len(prune(home, everything=True)) == 3
    assert store.all() == []


def test_an_image_that_cannot_be_removed_keeps_only_what_it_needs(home: Home) -> None:
    for number in (1, 2):
        add(home, f"base-primary-{number}", "base")
        add(home, f"family-a-{number}", "family", "a", f"base-primary-{number}")

    def discard(path: Path) -> None:
        if path.name == "family-a-1":
            raise HostError("It is elsewhere.")

    with pytest.raises(HostError, match=r"It is elsewhere\."):
        ImageStore(home).prune(set(), cloud="local", discard=discard, everything=True)
    assert [image.name for image in ImageStore(home).all()] == ["base-primary-1", "family-a-1"]


def test_an_unreadable_record_hides_no_other_image(home: Home) -> None:
    add(home, "base-primary-1", "base")
    add(home, "family-a-1", "family", "a", "base-primary-1")
    (home.images / "family-a-1" / "image.json").write_text("{")
    store = ImageStore(home)
    assert [image.name for image in store.all()] == ["base-primary-1"]
    assert store.unreadable().keys() == {"family-a-1"}
    with pytest.raises(InfrastructureError) as caught:
        prune(home, everything=True)
    assert f"remove the directory {home.images / 'family-a-1'}" in (caught.value.hint or "")
    assert store.finished("base-primary-1")


def test_a_record_of_an_earlier_version_says_which_directory_to_remove(home: Home) -> None:
    add(home, "family-a-1", "family", "a")
    record = home.images / "family-a-1" / "image.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "setup_key": ""}))
    with pytest.raises(InfrastructureError, match=r"image\.json cannot be read") as caught:
        ImageStore(home).load("family-a-1")
    assert f"remove the directory {record.parent}" in (caught.value.hint or "")


def test_a_missing_image_is_a_usage_error(home: Home) -> None:
    with pytest.raises(UsageError, match="no image nothing"):
        ImageStore(home).load("nothing")


def test_an_image_removed_during_a_template_can_be_rebuilt(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ImageStore(home)
    add(home, "family-x", "family")
    (store.path("family-x") / TEMPLATES / f"{UNFINISHED}abcd1234-k").mkdir(parents=True)
    pruned: list[list[str]] = []

    def locked_late(path: Path, *arguments: Any, **options: Any) -> Any:
        if TEMPLATES in path.parts and not pruned:
            pruned.append([])
            pruned.append(prune(home, everything=True))
        return locked(path, *arguments, **options)

    monkeypatch.setattr(images, "locked", locked_late)
    store.remove_unfinished()
    assert "family-x" in pruned[-1]
    add(home, "family-x", "family")


def test_layers_stay_while_an_image_over_them_stays(home: Home) -> None:
    add(home, "base-primary-1", "base")
    for name in ("layer-a-1", "layer-a-2", "layer-a-3"):
        add(home, name, "layer", "a", "base-primary-1")
    for number, layers in ((1, ("layer-a-1", "layer-a-2")), (2, ("layer-a-1", "layer-a-3"))):
        add(home, f"family-a-{number}", "family", "a", "base-primary-1", layers=layers)
    assert prune(home) == ["layer-a-2", "family-a-1"]
    assert prune(home, "family-a-2", everything=True) == ["layer-a-1", "layer-a-3"]


CURL = (
    b"Package: curl\nStatus: install ok installed\nArchitecture: amd64\nVersion: 7.88.1-10+deb12u8\n"
    b"Description: x\n y: z\n"
)


def test_installed_packages_are_listed_with_their_versions() -> None:
    removed = b"Package: wget\nStatus: deinstall ok config-files\nArchitecture: amd64\nVersion: 1\n"
    other = b"Version: 2:1.0~rc1\nPackage: libc6\nArchitecture: i386\nStatus: hold ok installed\n"
    assert installed_packages(CURL + b"\n" + removed + b"\n" + other) == (
        "curl:amd64=7.88.1-10+deb12u8", "libc6:i386=2:1.0~rc1",
    )  # fmt: skip


def test_what_is_no_package_is_left_out() -> None:
    names = (b"\x1b]0;x\x07", b"=1+1", b"a" * 999)
    for old, new in ((b"7.88", b"<script>"), (b"amd64", b""), *((b"curl", name) for name in names)):
        assert installed_packages(CURL.replace(old, new)) == ()
    assert installed_packages(b"\xff" * 1000) == ()
    assert installed_packages(b"") == ()


def test_a_list_without_end_is_cut() -> None:
    many = b"\n".join(CURL.replace(b"curl", b"p%d" % number) for number in range(200_000))
    assert len(installed_packages(many)) == MAXIMUM_PACKAGES
