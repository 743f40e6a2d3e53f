"""Tests that images are built once, named by a hash of their inputs, and adopted if another controller built them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from provisioner.base.errors import ImageBuildError, TaskFamilyError
from provisioner.base.models import Architecture, BaseImage, Distribution, VMSpec
from provisioner.family.loader import load_family
from provisioner.family.setup_data import parse_vm_spec
from provisioner.images import build
from provisioner.images.layers import aux_image_name, disk_gib, family_image_name
from provisioner.session import Session
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.guest import SETUP, Fails
from tests.unit.fakes.world import SIZE, family, told_of

PRIMARY = BaseImage(role="primary")


def spec(*steps: dict[str, Any], **more: Any) -> VMSpec:
    ranges = {"cpu_count_range": [1, 2], "ram_gib_range": [1, 2]}
    return parse_vm_spec({**ranges, "build_steps": list(steps), **more}, "spec")


SHELL = {"type": "shell", "commands": ["ls"]}
FILE = {"type": "file", "source": "data", "destination": "/data"}


def builds(cloud: FakeCloud) -> int:
    return len([run for run in cloud.runs() if run.startswith("apply build-")])


def test_a_family_image_is_built_once(session: Session, cloud: FakeCloud, tmp_path: Path) -> None:
    fam = family(tmp_path)
    name, setup = build.family_image(session, fam)
    assert build.family_image(session, fam) == (name, setup)
    assert builds(cloud) == 1
    assert setup.tasks["main"].instructions == "Do it."
    image = session.images.load(name)
    assert (image.kind, image.family, image.base) == ("family", "fam", "base-primary-0123456789abcdef")
    assert image.packages == ("curl:amd64=7.88.1-10",)
    assert (session.images.path(name) / "disk.qcow2").read_text().endswith(f" as {name}")
    assert cloud.existing() == []


@pytest.mark.parametrize("what", ["base", "file", "name", "variables"])
def test_a_family_images_name_depends_on(tmp_path: Path, what: str) -> None:
    fam = family(tmp_path)
    before = family_image_name(fam, "base-1", {"A": "1"})
    assert before == family_image_name(load_family(fam.directory), "base-1", {"A": "1"})
    if what == "file":
        (fam.directory / "data").write_text("x")
        fam = load_family(fam.directory)
    fam = replace(fam, name="other") if what == "name" else fam
    variables = {"A": "2"} if what == "variables" else {"A": "1"}
    assert family_image_name(fam, "base-2" if what == "base" else "base-1", variables) != before


def test_an_images_name_reveals_no_variable(tmp_path: Path) -> None:
    name = family_image_name(family(tmp_path), "base", {"TOKEN": "s3cret-value"})
    assert name.startswith("family-fam-")
    assert len(name) == len("family-fam-") + 16


def test_an_aux_images_name_depends_on_its_steps_and_files(tmp_path: Path) -> None:
    fam = family(tmp_path, data="1")
    names = {aux_image_name(fam, "base", spec(*steps)) for steps in ((SHELL,), (FILE,), (SHELL, FILE))}
    names.add(aux_image_name(fam, "other", spec(FILE)))
    (fam.directory / "data").write_text("2")
    names.add(aux_image_name(fam, "base", spec(FILE)))
    assert len(names) == 5
    (fam.directory / "fam.py").write_text("# another module")
    assert aux_image_name(fam, "base", spec(FILE)) in names


def test_an_image_that_the_cloud_has_lost_is_built_again(session: Session, cloud: FakeCloud, tmp_path: Path) -> None:
    fam = family(tmp_path)
    name, _ = build.family_image(session, fam)
    cloud.faults.lost_images = {name}
    build.family_image(session, fam)
    assert builds(cloud) == 2
    assert f"The cloud no longer has the image {name}" in told_of(session).notes


def test_an_image_that_another_controller_built_is_only_read(
    session: Session, cloud: FakeCloud, tmp_path: Path
) -> None:
    fam = family(tmp_path)
    base = build.base_image(session, PRIMARY)
    name = family_image_name(fam, base, session.variables)
    cloud.foreign_images = {name}
    assert build.family_image(session, fam)[0] == name
    assert cloud.guest().operations == ["setup"]
    assert cloud.guest().trees == {}
    assert (session.images.path(name) / "ami.json").read_text() == name
    assert cloud.existing() == []


def test_a_failed_build_leaves_no_image_and_no_machine(session: Session, cloud: FakeCloud, tmp_path: Path) -> None:
    fam = family(tmp_path)
    cloud.guest_defaults = {"values": {"install": Fails("no network")}}
    with pytest.raises(ImageBuildError, match=r"fam: importing the family or install\(\) raised"):
        build.family_image(session, fam)
    assert build.built_family_image(session, fam) is None
    assert [image.kind for image in session.images.all()] == ["base"]
    assert cloud.existing() == []


def test_a_build_tells_warnings_but_not_without_end(session: Session, cloud: FakeCloud, tmp_path: Path) -> None:
    tasks = {f"task {number}": {"warnings": [f"Task {number} differs."]} for number in range(30)}
    cloud.guest_defaults = {"values": {"setup": {**SETUP, "tasks": tasks, "warnings": ["No instructions."]}}}
    build.family_image(session, family(tmp_path))
    told = [note for note in told_of(session).notes if note.startswith("warning: ")]
    assert told[:2] == ["warning: No instructions.", "warning: Task 0 differs."]
    assert told[20:] == ["warning: there are 11 more warnings; `provisioner tasks` lists them"]


def test_invalid_setup_data_leaves_no_image(session: Session, cloud: FakeCloud, tmp_path: Path) -> None:
    cloud.guest_defaults = {"values": {"setup": {"tasks": {}}}}
    with pytest.raises(TaskFamilyError, match="has no tasks"):
        build.family_image(session, family(tmp_path))
    assert [image.kind for image in session.images.all()] == ["base"]


def test_a_base_image_is_built_once_from_the_vendors_image(session: Session, cloud: FakeCloud) -> None:
    cloud.vendor_images = True
    name = build.base_image(session, PRIMARY)
    assert build.base_image(session, PRIMARY) == name
    assert builds(cloud) == 1
    image = session.images.load(name)
    assert (image.kind, image.base) == ("base", "vendor-debian-12")
    assert build.base_image(session, BaseImage(role="aux")) != name


def test_a_base_image_that_another_controller_built_is_adopted(session: Session, cloud: FakeCloud) -> None:
    cloud.vendor_images = True
    name = build.base_image(session, PRIMARY)
    session.images.prune(set(), cloud="local", discard=lambda _: None, everything=True)
    cloud.foreign_images = {name}
    assert build.base_image(session, PRIMARY) == name
    assert builds(cloud) == 1


def test_a_built_family_image_is_found_without_a_builder(session: Session, cloud: FakeCloud, tmp_path: Path) -> None:
    cloud.vendor_images = True
    fam = family(tmp_path)
    assert build.built_family_image(session, fam) is None
    name, _ = build.family_image(session, fam)
    assert build.built_family_image(session, fam) == name
    assert build.built_family_image(replace(session, variables={"TOKEN": "other"}), fam) is None


@pytest.mark.parametrize("name", ["family-other-0123", "base-primary-0123"])
def test_an_image_of_another_version_hides_no_other(
    session: Session, cloud: FakeCloud, tmp_path: Path, name: str
) -> None:
    cloud.vendor_images = True
    fam = family(tmp_path)
    built, _ = build.family_image(session, fam)
    session.images.path(name).mkdir()
    (session.images.path(name) / "image.json").write_text('{"kind": "of another version"}')
    assert build.built_family_image(session, fam) == built


@pytest.mark.parametrize("vendor_images", [True, False], ids=["prepared", "whole"])
def test_a_manifests_base_image_wins_over_the_settings(
    session: Session, cloud: FakeCloud, tmp_path: Path, *, vendor_images: bool
) -> None:
    cloud.vendor_images = vendor_images
    newer = replace(session, base_image="debian-13")
    silent = family(tmp_path)
    names = [build.family_image(each, silent)[0] for each in (session, newer)]
    named = family(tmp_path, **{"manifest.yaml": "base_image: debian-12\ntasks: {}\n"})
    names += [build.family_image(newer, named)[0]]
    bases = [session.images.load(name).base or "" for name in names]
    assert [base.rpartition("-")[0] for base in bases] == ["base-primary", "base-primary-debian-13", "base-primary"]
    assert len(set(names)) == 3
    for each, fam, name in ((session, silent, names[0]), (newer, silent, names[1]), (newer, named, names[2])):
        assert build.built_family_image(each, fam) == name


def test_base_images_of_two_kinds_have_two_labels() -> None:
    kinds = [
        BaseImage(role=role, distribution=distribution, architecture=architecture)
        for role in ("primary", "aux")
        for distribution in get_args(Distribution)
        for architecture in get_args(Architecture)
    ]
    assert len({kind.label for kind in kinds}) == len(kinds) == 12
    assert (PRIMARY.label, kinds[-1].label) == ("base-primary", "base-aux-ubuntu-20-04-cuda-arm64")


def test_an_aux_vm_without_build_steps_boots_from_the_base_image(
    session: Session, cloud: FakeCloud, tmp_path: Path
) -> None:
    assert build.aux_image(session, family(tmp_path), spec(), SIZE) == "base-aux-0123456789abcdef"
    assert builds(cloud) == 0


def test_an_aux_image_is_built_without_secrets(session: Session, cloud: FakeCloud, tmp_path: Path) -> None:
    fam = family(tmp_path, data="1")
    name = build.aux_image(session, fam, spec(SHELL, FILE), SIZE)
    request = cloud.guest().request("shell")
    assert (request["user"], request["cwd"], request["environment"]) == ("admin", "/home/admin", {})
    assert (cloud.guest().files, cloud.guest().ran_as) == ({"/data": b"1"}, ["admin"])
    assert build.aux_image(session, fam, spec(SHELL, FILE), SIZE) == name
    assert builds(cloud) == 1


def test_build_steps_on_an_ubuntu_run_as_its_own_user(session: Session, cloud: FakeCloud, tmp_path: Path) -> None:
    gpus = {"count_range": [1, 1], "model": "a10"}
    asked = spec(SHELL, base_image_type="ubuntu-20.04-cuda", gpu_spec=gpus)
    build.aux_image(session, family(tmp_path), asked, SIZE)
    request = cloud.guest().request("shell")
    assert (request["user"], request["cwd"]) == ("ubuntu", "/home/ubuntu")


def test_an_aux_file_outside_the_family_is_refused_first(session: Session, cloud: FakeCloud, tmp_path: Path) -> None:
    with pytest.raises(TaskFamilyError, match="leads out"):
        build.aux_image(session, family(tmp_path), spec({**FILE, "source": "../x"}), SIZE)
    assert builds(cloud) == 0


def test_all_images_of_a_family_are_built_and_recorded(session: Session, cloud: FakeCloud, tmp_path: Path) -> None:
    aux = spec(SHELL).model_dump(mode="json", exclude_none=True)
    tasks = {"main": {"aux_vm_spec": aux}, "other": {"aux_vm_spec": aux}, "alone": {}}
    cloud.guest_defaults = {"values": {"setup": {**SETUP, "tasks": tasks}}}
    name, aux_names = build.build_all(session, family(tmp_path))
    assert [name.split("-")[0] for name in aux_names] == ["aux"]
    assert list(session.images.load(name).needs) == aux_names
    assert builds(cloud) == 2


@pytest.mark.parametrize(("storage", "gib"), [("{}", 16), ("{storage_gb: 3}", 16), ("{storage_gb: 40.5}", 41)], ids=str)
def test_an_images_disk_fits_the_largest_task(tmp_path: Path, storage: str, gib: int) -> None:
    fam = family(tmp_path, **{"manifest.yaml": f"tasks: {{one: {{}}, two: {{resources: {storage}}}}}"})
    assert disk_gib(fam) == gib
    assert build.fitting_image(SIZE, fam).disk_gib == gib
    large = SIZE.model_copy(update={"disk_gib": 100})
    assert build.fitting_image(large, fam) == large
