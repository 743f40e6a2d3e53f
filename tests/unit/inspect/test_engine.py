"""Tests what a machine with a Docker Engine is made of."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from provisioner.errors import UsageError
from provisioner.images import build
from provisioner.inspect.configuration import Configuration, configuration_of
from provisioner.inspect.engine import engine_family, images_in, machine_of, project_of
from provisioner.inspect.plain_family import TASK
from provisioner.session import Session
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.world import told_of


def _archive(directory: Path, name: str, *images: str, digest: str = "", **more: object) -> Path:
    """Writes what `docker save` would, without layers.

    Args:
        digest: of each image; empty for an archive of an older engine, which has none.
        more: what the archive says of its images beside.
    """
    directory.mkdir(exist_ok=True)
    files: dict[str, object] = {"manifest.json": [{"Config": "c.json", "RepoTags": images, "Layers": [], **more}]}
    if digest:
        named = [{"io.containerd.image.name": f"docker.io/library/{image}"} for image in images]
        files["index.json"] = {"manifests": [{"digest": digest, "annotations": each} for each in named]}
    with tarfile.open(directory / name, "w") as archive:
        for file, value in files.items():
            data = json.dumps(value).encode()
            member = tarfile.TarInfo(file)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return directory / name


def _configuration(tmp_path: Path, text: str, **more: str) -> Configuration:
    (tmp_path / "app").mkdir(exist_ok=True)
    (tmp_path / "app" / "Dockerfile").write_text("FROM debian:12\n")
    (tmp_path / "compose.yaml").write_text(text)
    return configuration_of(str(tmp_path / "compose.yaml")).model_copy(update=more)


def _script(configuration: Configuration) -> str:
    project = project_of(configuration, {})
    assert project
    return machine_of(project, configuration.by_role["primary"], configuration.registry).run[-1]


def test_the_machines_family_has_an_engine_of_debian_13(tmp_path: Path) -> None:
    configuration = _configuration(tmp_path, "services: {web: {build: ./app}}")
    project = project_of(configuration, {})
    assert project
    family = engine_family(project, configuration)
    assert family.manifest.base_image == "debian-13"
    assert family.manifest.resources(TASK).memory_gb == 2
    steps = json.loads((family.directory / "build_steps.json").read_text())
    assert "docker.io docker-cli docker-compose docker-buildx" in steps[0]["commands"][-1]
    assert steps[1]["destination"] == "/opt/sandbox/context0.tar"
    with tarfile.open(family.directory / steps[1]["source"]) as archive:
        assert archive.getnames() == ["context0", "context0/Dockerfile"]


def test_the_disk_has_room_for_what_is_copied(tmp_path: Path) -> None:
    configuration = _configuration(tmp_path, "services: {web: {build: ./app}}")
    with (tmp_path / "app" / "data").open("wb") as file:
        file.truncate(3 << 30)
    project = project_of(configuration, {})
    assert project
    assert machine_of(project, configuration.by_role["primary"], "").storage_gb == 12 + 4 * 3 + 1


def test_the_script_is_a_shells(tmp_path: Path) -> None:
    text = "services: {web: {build: {context: ./app, args: {A: \"it's $$x\"}}}, db: {image: 'postgres:16'}}"
    script = _script(_configuration(tmp_path, text, registry="http://mirror.example:5000"))
    subprocess.run(["bash", "-n", "-c", script], check=True)
    assert '"insecure-registries": ["mirror.example:5000"]' in script
    assert "docker image inspect postgres:16 > /dev/null 2>&1 || docker pull postgres:16" in script
    assert "docker compose -f /opt/sandbox/build.json build web\n" in script


def test_messages_say_what_is_done(session: Session, cloud: FakeCloud, tmp_path: Path) -> None:
    _archive(tmp_path / "images", "base.tar", "debian:12")
    text = "services: {web: {build: ./app}, db: {image: 'postgres:16'}, bad: {image: \"x\\nreboot\"}}"
    configuration = _configuration(tmp_path, text, registry=str(tmp_path / "images"))
    project = project_of(configuration, {})
    assert project
    build.family_image(session, engine_family(project, configuration))
    said = [note.removeprefix("machine default: ") for note in told_of(session).notes if note.startswith("machine")]
    assert said == [
        "packages docker.io docker-cli docker-compose docker-buildx apparmor",
        "copy /opt/sandbox/context0.tar",
        "copy /opt/sandbox/images/0.tar",
        "user root, /workspace",
        "engine",
        "load debian:12",
        "build web",
        "pull postgres:16",
        "pull x reboot",
        "clean up",
    ]
    scripts = [request["commands"] for request in cloud.guest().requests if request["operation"] == "shell"]
    assert not any(line == "reboot" for script in scripts for line in "\n".join(script).splitlines())
    for script in scripts:
        subprocess.run(["bash", "-n", "-c", "\n".join(script)], check=True)


def test_images_are_built_one_at_a_time(tmp_path: Path) -> None:
    lines = _script(_configuration(tmp_path, "services: {a: {build: ./app}, b: {build: ./app}}")).splitlines()
    builds = [line.rpartition(" ")[2] for line in lines if line.startswith("docker compose")]
    assert builds == ["a", "b"]


def test_nothing_is_built_where_all_images_are_pulled(tmp_path: Path) -> None:
    script = _script(_configuration(tmp_path, "services: {db: {image: 'postgres:16'}}"))
    assert "build" not in script.replace("builder", "")
    assert "daemon.json" not in script


def test_only_archives_of_needed_images_are_copied(tmp_path: Path) -> None:
    images = tmp_path / "images"
    base = _archive(images, "base.tar", "debian:12")
    used = _archive(images, "used.tar", "mine:latest")
    _archive(images, "other.tar", "unused:1")
    (images / "notes.txt").write_text("not an archive")
    text = "services: {web: {build: ./app}, db: {image: docker.io/library/mine, x-local: true}}"
    configuration = _configuration(tmp_path, text, registry=str(images))
    project = project_of(configuration, {})
    assert project
    machine = machine_of(project, configuration.by_role["primary"], configuration.registry)
    assert [source for _, source in machine.files] == [str(base), str(used)]
    assert "docker load" in machine.run[-1]


def test_a_local_image_that_is_in_no_archive_is_named(tmp_path: Path) -> None:
    configuration = _configuration(tmp_path, "services: {db: {image: mine, x-local: true}}")
    with pytest.raises(UsageError, match="'mine' is marked x-local, and `registry` names no directory"):
        _script(configuration)
    _archive(tmp_path / "images", "other.tar", "other:1")
    with pytest.raises(UsageError, match="'mine' is marked x-local, and no archive in"):
        _script(configuration.model_copy(update={"registry": str(tmp_path / "images")}))


A, B = f"sha256:{'a' * 64}", f"sha256:{'b' * 64}"


@pytest.mark.parametrize("image", ["mine:1", "mine", "docker.io/library/mine:1"])
@pytest.mark.parametrize("x_local", [True, False])
def test_a_pinned_image_is_the_archives_of_that_name(tmp_path: Path, image: str, x_local: bool) -> None:
    archive = _archive(tmp_path / "images", "mine.tar", "mine:1" if ":" in image else "mine:latest")
    text = f"services: {{web: {{image: '{image}@{A}', x-local: {str(x_local).lower()}}}}}"
    configuration = _configuration(tmp_path, text, registry=str(tmp_path / "images"))
    project = project_of(configuration, {})
    assert project
    # An engine that has loaded an image knows it by its tag, and not by the digest.
    assert json.loads(project.run)["services"]["web"]["image"] == image
    assert project.notes == (f"{image}@{A} is taken from {archive}, which does not have the digest: they were not "
                             "compared.",)  # fmt: skip
    machine = machine_of(project, configuration.by_role["primary"], configuration.registry)
    assert [source for _, source in machine.files] == [str(archive)]
    assert "docker load" in machine.run[-1]
    assert "docker pull" not in machine.run[-1]


def test_a_dockerfiles_pinned_image_is_the_archives_of_that_name(tmp_path: Path) -> None:
    _archive(tmp_path / "images", "mine.tar", "mine:1")
    configuration = _configuration(tmp_path, "services: {web: {build: ./app}}", registry=str(tmp_path / "images"))
    (tmp_path / "app" / "Dockerfile").write_text(f"FROM docker.io/library/mine:1@{A}\nCOPY --from=other@{B} / /\n")
    project = project_of(configuration, {})
    assert project
    build = json.loads(project.build)["services"]["web"]["build"]
    assert build["additional_contexts"] == {f"mine:1@{A}": "docker-image://docker.io/library/mine:1"}


def test_a_digest_that_an_archive_has_is_compared(tmp_path: Path) -> None:
    configuration = _configuration(
        tmp_path, f"services: {{db: {{image: 'mine:1@{A}'}}}}", registry=str(tmp_path / "images")
    )
    _archive(tmp_path / "images", "mine.tar", "mine:1", digest=A)
    project = project_of(configuration, {})
    assert project
    assert (project.images, project.notes) == (("mine:1",), ())
    archive = _archive(tmp_path / "images", "mine.tar", "mine:1", digest=B)
    with pytest.raises(UsageError, match=f"'mine:1@{A}': {archive} has another image of this name, '{B}'"):
        project_of(configuration, {})
    # Docker 25 to 28 write an index, with digests that no registry has.
    _archive(tmp_path / "images", "mine.tar", "mine:1", digest=B, LayerSources={})
    project = project_of(configuration, {})
    assert project
    assert (project.images, len(project.notes)) == (("mine:1",), 1)


def test_one_archive_does_not_pass_for_two_pinned_images(tmp_path: Path) -> None:
    _archive(tmp_path / "images", "mine.tar", "mine:1")
    text = f"services: {{a: {{image: 'mine:1@{A}'}}, b: {{image: 'mine:1@{B}'}}}}"
    with pytest.raises(UsageError, match=f"'mine:1@{B}': .* has another image of this name"):
        project_of(_configuration(tmp_path, text, registry=str(tmp_path / "images")), {})


def test_a_pinned_image_that_no_archive_has_is_pulled_as_pinned(tmp_path: Path) -> None:
    _archive(tmp_path / "images", "other.tar", "mine:2")
    script = _script(
        _configuration(tmp_path, f"services: {{a: {{image: 'mine:1@{A}'}}}}", registry=str(tmp_path / "images"))
    )
    assert f"docker pull mine:1@{A}" in script


def _header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    return member.tobuf(tarfile.GNU_FORMAT)


def test_a_compressed_archive_names_its_images(tmp_path: Path) -> None:
    plain = _archive(tmp_path, "x.tar", "mine:1")
    (tmp_path / "x.tgz").write_bytes(gzip.compress(plain.read_bytes()))
    assert images_in(tmp_path / "x.tgz") == {"mine:1": ""}


@pytest.mark.parametrize(
    "content",
    [
        b"no archive",
        b"",
        gzip.compress(_header("layer.tar", 100))[:-20],
        _header("pax", 3 << 30, tarfile.XHDTYPE),
        gzip.compress(_header("layer.tar", 1 << 40) + _header("manifest.json", 1)),
        _header("manifest.json", 3) + b"[1]".ljust(512, b"\0"),
        _header("manifest.json", 2) + b"[1".ljust(512, b"\0"),
        _header("manifest.json", 2) + b"[]".ljust(512, b"\0") + _header("index.json", 2) + b"[]".ljust(512, b"\0"),
        _header("index.json", 2) + b"{}".ljust(512, b"\0"),
    ],
    ids=["text", "empty", "half", "huge header", "huge layer", "no list", "half list", "no index", "index alone"],
)
def test_what_is_no_archive_of_docker_save_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.tar").write_bytes(content)
    with pytest.raises(UsageError, match=r"x\.tar is no archive of `docker save`"):
        images_in(tmp_path / "x.tar")


def test_a_registry_that_is_neither_kind_is_named(tmp_path: Path) -> None:
    configuration = _configuration(tmp_path, "services: {db: {image: x}}", registry=str(tmp_path / "missing"))
    with pytest.raises(UsageError, match="neither a directory of archives nor the address of a mirror"):
        _script(configuration)


def test_archives_that_no_machine_has_room_for_are_named(tmp_path: Path) -> None:
    archive = _archive(tmp_path / "images", "base.tar", "x:latest")
    os.truncate(archive, 9 << 30)
    configuration = _configuration(tmp_path, "services: {db: {image: x}}", registry=str(tmp_path / "images"))
    with pytest.raises(UsageError, match=r"`registry` .*images: the archives of this file's images have 9\.0 GiB"):
        _script(configuration)


def test_a_registry_of_too_many_archives_is_named(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    for number in range(1001):
        (tmp_path / "images" / f"{number}.tar").touch()
    configuration = _configuration(tmp_path, "services: {db: {image: x}}", registry=str(tmp_path / "images"))
    with pytest.raises(UsageError, match="images has 1001 archives; at most 1000 are read"):
        _script(configuration)


def test_the_machines_own_settings_are_kept(tmp_path: Path) -> None:
    text = "services: {web: {image: x}}\nx-provisioner: {machines: [{memory_gb: 8, packages: [jq], run: ['true']}]}"
    configuration = _configuration(tmp_path, text)
    project = project_of(configuration, {})
    assert project
    machine = machine_of(project, configuration.by_role["primary"], "")
    assert machine.memory_gb == 8
    assert machine.packages[-1] == "jq"
    assert machine.run[0] == "true"
