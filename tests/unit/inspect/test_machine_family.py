"""Tests that a machine's configuration becomes a family that our own checks accept."""

from __future__ import annotations

import gzip
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from provisioner.base.errors import UsageError
from provisioner.base.models import ShellBuildStep
from provisioner.images import build
from provisioner.images.layers import family_image_name
from provisioner.inspect import machine_family
from provisioner.inspect.compose_project import Project
from provisioner.inspect.configuration import Configuration, Machine, configuration_of
from provisioner.inspect.machine_family import (
    PREFIX,
    SOURCES,
    TASK,
    engine_family,
    family_of_machine,
    images_in,
    machine_of,
    pack,
    plain_family,
    project_of,
    remove_abandoned,
)
from provisioner.session import Session
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.world import told_of


def _written(tmp_path: Path, name: str, machine: Machine) -> Path:
    (tmp_path / name).mkdir()
    return plain_family(machine, "none", tmp_path / name).directory


def test_all_that_is_configured_is_in_the_family(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "one").write_text("1")
    machine = Machine(
        user="dev", packages=("nmap", "git=1:2"), run=("make it so",), memory_gb=2, storage_gb=9,
        files=(("/srv/data", str(tmp_path / "data")),), services=(("web", "echo $HOME 100% 'now'"),),
    )  # fmt: skip
    (tmp_path / "a").mkdir()
    family = plain_family(machine, "full", tmp_path / "a")
    assert family.manifest.resources(TASK).memory_gb == 2
    assert family.manifest.resources(TASK).storage_gb == 9
    assert "full_internet" in family.module.read_text()
    steps = json.loads((family.directory / "build_steps.json").read_text())
    text = json.dumps(steps)
    for part in (
        "nmap git=1:2",
        "/srv/data",
        "useradd --create-home --shell /bin/bash dev",
        "make it so",
        "web.service",
    ):
        assert part in text
    assert (family.directory / SOURCES / "0" / "one").read_text() == "1"
    unit = (family.directory / SOURCES / "web.service").read_text()
    assert r"""ExecStart=/bin/sh -c "echo $$HOME 100%% 'now'" """.strip() in unit


def test_equal_configurations_share_one_image(tmp_path: Path) -> None:
    data = tmp_path / "data"
    names = []
    for name, text, machine in (
        ("a", "1", Machine()),
        ("b", "1", Machine()),
        ("c", "2", Machine()),
        ("d", "1", Machine(run=("true",))),
        ("e", "1", Machine(storage_gb=40)),
    ):
        data.write_text(text)
        (tmp_path / name).mkdir()
        machine = machine.model_copy(update={"files": (("/srv/data", str(data)),)})
        names.append(family_image_name(plain_family(machine, "none", tmp_path / name), "base", {}))
    assert names[0] == names[1]
    assert len(set(names)) == 4


def test_the_machine_gets_only_what_is_configured(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("1")
    run = ("cat manifest.yaml sandbox.py build_steps.json sources",)
    machine = Machine(run=run, files=(("/srv/data", str(tmp_path / "data")),))
    family = plain_family(machine, "none", tmp_path / "a")
    assert family.files == ("sandbox.py",)  # our programs read the machine's setup from it
    assert [family.files_of(step) for step in family.build_steps] == [(), ("sources/0",), (), ()]


def test_the_families_python_is_removed_before_anything_is_installed(tmp_path: Path) -> None:
    usr_local = tmp_path / "usr" / "local"
    for name in ("bin/python3", "include/python3.11/Python.h", "lib/python3.11/os.py", "lib/python3.13/dist-packages/x",
                 "share/x"):  # fmt: skip
        (usr_local / name).parent.mkdir(parents=True, exist_ok=True)
        (usr_local / name).touch()
    family = plain_family(Machine(packages=("python3-flask",)), "none", tmp_path / "a")
    assert isinstance(family.build_steps[0], ShellBuildStep)
    _, remove, *install = family.build_steps[0].commands
    assert "python3-flask" in install[-1]
    subprocess.run(["bash", "-euc", remove.replace("/usr/local", str(usr_local))], check=True)
    assert sorted(str(path.relative_to(usr_local)) for path in usr_local.rglob("*") if path.is_file()) == [
        "lib/python3.13/dist-packages/x",
        "share/x",
    ]


def test_a_file_that_does_not_exist_is_named(tmp_path: Path) -> None:
    machine = Machine(files=(("/srv/x", str(tmp_path / "missing")),))
    with pytest.raises(UsageError, match="missing"):
        _written(tmp_path, "a", machine)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory for temporary files."""
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    monkeypatch.setattr(machine_family, "_families", {})
    machine_family._directory.cache_clear()
    yield directory
    machine_family._directory.cache_clear()


def _machine(tmp_path: Path) -> Machine:
    (tmp_path / "data").mkdir(exist_ok=True)
    (tmp_path / "data" / "one").write_text("1")
    return Machine(files=(("/srv/data", str(tmp_path / "data")),))


def test_samples_share_one_copy_of_each_distinct_machine(tmp_path: Path, temporary: Path) -> None:
    machine = _machine(tmp_path)
    first = family_of_machine(machine, "none")
    assert (first.directory / SOURCES / "0" / "one").read_text() == "1"
    assert family_of_machine(machine.model_copy(), "none") is first
    assert family_of_machine(machine, "full") is not first
    [directory] = temporary.iterdir()
    assert len(list(directory.iterdir())) == 2


def test_changed_files_are_copied_again(tmp_path: Path) -> None:
    machine = _machine(tmp_path)
    family_of_machine(machine, "none")
    (tmp_path / "data" / "one").write_text("another text")
    again = family_of_machine(machine, "none")
    assert (again.directory / SOURCES / "0" / "one").read_text() == "another text"


def test_a_log_that_grows_in_a_packed_directory_changes_no_copy(tmp_path: Path) -> None:
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "run.eval").write_text("1")
    packed = (("/opt/context0.tar", str(tmp_path / "eval")),)
    first = family_of_machine(Machine(), "none", packed=packed)
    (tmp_path / "eval" / "run.eval").write_text("1, 2")
    assert family_of_machine(Machine(), "none", packed=packed) is first
    (tmp_path / "eval" / "Dockerfile").write_text("FROM x")
    assert family_of_machine(Machine(), "none", packed=packed) is not first


def test_a_changed_target_of_a_link_is_copied_again(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("1")
    (tmp_path / "link").symlink_to(tmp_path / "text")
    machine = Machine(files=(("/srv/text", str(tmp_path / "link")),))
    first = family_of_machine(machine, "none")
    assert family_of_machine(machine, "none") is first
    (tmp_path / "text").write_text("another text")
    again = family_of_machine(machine, "none")
    assert (again.directory / SOURCES / "0").read_text() == "another text"


def test_a_link_that_cannot_be_copied_is_named_and_leaves_nothing(tmp_path: Path, temporary: Path) -> None:
    machine = _machine(tmp_path)
    family_of_machine(machine, "none")
    before = sorted(temporary.rglob("*"))
    (tmp_path / "data" / "deep").mkdir()
    (tmp_path / "data" / "deep" / "link").symlink_to("/usr/bin/python3")
    with pytest.raises(UsageError, match=r"/data cannot be copied for .*: The link 'deep/link' is") as caught:
        family_of_machine(machine, "none")
    assert "family" not in caught.value.message
    assert sorted(temporary.rglob("*")) == before


def test_a_killed_process_leaves_nothing_that_others_use(temporary: Path) -> None:
    program = (
        "import tempfile, sys, time\n"
        f"tempfile.tempdir = {str(temporary)!r}\n"
        "from provisioner.inspect import machine_family\n"
        "print(machine_family._directory(), flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        directory = Path(process.stdout.readline().strip())
        assert directory.name.startswith(PREFIX)
        long_ago = time.time() - 2 * machine_family.YOUNG_SECONDS
        os.utime(directory, (long_ago, long_ago))
        remove_abandoned()
        assert directory.exists()
        process.send_signal(signal.SIGKILL)
    (temporary / f"{PREFIX}young").mkdir()
    remove_abandoned()
    assert [path.name for path in temporary.iterdir()] == [f"{PREFIX}young"]


def _tree(directory: Path) -> Path:
    (directory / "empty").mkdir(parents=True)
    (directory / ".git").mkdir()
    (directory / ".git" / "HEAD").write_text("ref")
    (directory / "run.sh").write_text("#!/bin/sh\n")
    (directory / "run.sh").chmod(0o750)
    (directory / "out").symlink_to("/etc/passwd")
    return directory


def test_equal_trees_make_equal_archives_with_everything_in_them(tmp_path: Path) -> None:
    one, other = _tree(tmp_path / "a"), _tree(tmp_path / "b")
    os.utime(other / "run.sh", (1, 1))
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
    first = Path(pack(one, "/opt/context0.tar", tmp_path / "x"))
    second = Path(pack(other, "/opt/context0.tar", tmp_path / "y"))
    assert first.read_bytes() == second.read_bytes()
    with tarfile.open(first) as archive:
        members = {member.name: member for member in archive}
    inside = {f"context0/{name}" for name in (".git", ".git/HEAD", "empty", "out", "run.sh")}
    assert set(members) == {"context0", *inside}
    assert members["context0/run.sh"].mode == 0o750
    assert members["context0/out"].linkname == "/etc/passwd"
    assert {member.uid for member in members.values()} == {0}


def test_inspects_logs_are_left_out(tmp_path: Path) -> None:
    before, after = _tree(tmp_path / "a"), _tree(tmp_path / "b")
    (after / "logs").mkdir()
    for name in ("logs/2026_task.eval", "last.eval"):
        (after / name).write_text("the answers")
    for directory in ("x", "y"):
        (tmp_path / directory).mkdir()
    packed = [Path(pack(tree, "/opt/context0.tar", tmp_path / to)) for tree, to in ((before, "x"), (after, "y"))]
    assert packed[0].read_bytes() == packed[1].read_bytes()


def test_a_single_file_is_packed_by_the_archives_name(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("1")
    (tmp_path / "link").symlink_to("data")
    with tarfile.open(pack(tmp_path / "link", "/opt/files1.tar", tmp_path)) as archive:
        assert [(member.name, member.isreg()) for member in archive] == [("files1", True)]


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    os.mkfifo(tmp_path / "tree" / "pipe")
    with pytest.raises(UsageError, match="files0/pipe is neither a file, a directory nor a link"):
        pack(tmp_path / "tree", "files0.tar", tmp_path)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="missing cannot be copied: No such file"):
        pack(tmp_path / "missing", "files0.tar", tmp_path)


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


def _project(configuration: Configuration) -> Project:
    project = project_of(configuration, {})
    assert project
    return project


def _script(configuration: Configuration) -> str:
    project = _project(configuration)
    return machine_of(project, configuration.by_role["primary"], configuration.registry).run[-1]


def test_the_machines_family_has_an_engine_of_debian_13(tmp_path: Path) -> None:
    configuration = _configuration(tmp_path, "services: {web: {build: ./app}}")
    project = _project(configuration)
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
    project = _project(configuration)
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
    project = _project(configuration)
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
    project = _project(configuration)
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
    project = _project(configuration)
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
    project = _project(configuration)
    build = json.loads(project.build)["services"]["web"]["build"]
    assert build["additional_contexts"] == {f"mine:1@{A}": "docker-image://docker.io/library/mine:1"}


def test_a_digest_that_an_archive_has_is_compared(tmp_path: Path) -> None:
    configuration = _configuration(
        tmp_path, f"services: {{db: {{image: 'mine:1@{A}'}}}}", registry=str(tmp_path / "images")
    )
    _archive(tmp_path / "images", "mine.tar", "mine:1", digest=A)
    project = _project(configuration)
    assert (project.images, project.notes) == (("mine:1",), ())
    archive = _archive(tmp_path / "images", "mine.tar", "mine:1", digest=B)
    with pytest.raises(UsageError, match=f"'mine:1@{A}': {archive} has another image of this name, '{B}'"):
        project_of(configuration, {})
    # Docker 25 to 28 write an index, with digests that no registry has.
    _archive(tmp_path / "images", "mine.tar", "mine:1", digest=B, LayerSources={})
    project = _project(configuration)
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
    project = _project(configuration)
    machine = machine_of(project, configuration.by_role["primary"], "")
    assert machine.memory_gb == 8
    assert machine.packages[-1] == "jq"
    assert machine.run[0] == "true"
