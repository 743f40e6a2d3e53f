"""Writes a machine's configuration as a task family of one task, so that it is built, cached and isolated as one.

All samples of a process share one copy of the files, which are packed to the same bytes whenever they are the same.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gzip
import itertools
import json
import math
import os
import re
import shlex
import shutil
import tarfile
import tempfile
import threading
import time
import zlib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from provisioner.base import strict_json
from provisioner.base.errors import TaskFamilyError, UsageError
from provisioner.base.validation import shown
from provisioner.family.build_steps import load_build_steps
from provisioner.family.files import MAXIMUM_TOTAL_BYTES, list_files
from provisioner.family.loader import TaskFamily, load_family
from provisioner.images.provisioning import part
from provisioner.inspect.compose import is_url, read
from provisioner.inspect.compose_project import DIRECTORY, Project, full_name, short_name, translated
from provisioner.inspect.configuration import Configuration, Machine, Pairs, by_reference

FAMILY = "sandbox"
TASK = "machine"
WORKDIR = "/workspace"
# The family's directory with what its build steps copy.
SOURCES = "sources"

# The Python of families, which hides Debian's.
_REMOVE_FAMILY_PYTHON = (
    "find /usr/local/bin /usr/local/include /usr/local/lib/python3* -mindepth 1 -maxdepth 1 ! -name dist-packages "
    "-exec rm -rf {} +"
)

_MODULE = '''"""A machine of an Inspect eval, without a task of its own."""


class TaskFamily:
    standard_version = "0.5.0"

    @staticmethod
    def get_tasks():
        return {{"{task}": {{}}}}

    @staticmethod
    def get_instructions(t):
        return ""

    @staticmethod
    def get_permissions(t):
        return {permissions!r}
'''
_UNIT = """[Unit]
Description={name}, of the eval's configuration
After=network.target
StartLimitIntervalSec=0

[Service]
ExecStart=/bin/sh -c {command}
Restart=always
RestartSec=1
# The kernel ends it before the machine does nothing else any more than wait for memory.
MemoryMax=90%

[Install]
WantedBy=multi-user.target
"""


def workdir(machine: Machine) -> str:
    """Returns the directory of a machine's relative paths."""
    return machine.workdir or WORKDIR


def plain_family(machine: Machine, internet: str, directory: Path, base_image: str = "") -> TaskFamily:
    """Writes a family that makes a configuration's machine, and loads it.

    Args:
        internet: as the configuration says.
        directory: a directory for it, in which no other is.
        base_image: the base image that it needs; empty for what the operator's settings say.

    Raises:
        UsageError: a file that the configuration names does not exist or cannot be copied.
    """
    family = directory / FAMILY
    (family / SOURCES).mkdir(parents=True)
    permissions = ["full_internet"] if internet == "full" else []
    (family / f"{FAMILY}.py").write_text(_MODULE.format(task=TASK, permissions=permissions))
    asked = {"cpus": machine.cpus, "memory_gb": machine.memory_gb, "storage_gb": machine.storage_gb}
    resources = {name: value for name, value in asked.items() if value is not None}
    needs = {"base_image": base_image} if base_image else {}
    (family / "manifest.yaml").write_text(json.dumps({**needs, "tasks": {TASK: {"resources": resources}}}))
    steps = [_packages(machine), *_files(machine, family), _users(machine), *map(_shell, machine.run)]
    steps += _services(machine, family)
    (family / "build_steps.json").write_text(json.dumps(steps))
    loaded = load_family(family)
    # What steps copy goes where they say, and nowhere else. Nothing here is what the text of `run` may name.
    return replace(loaded, files=(loaded.module.name,), build_steps=load_build_steps(family))


def _shell(*commands: str) -> dict[str, object]:
    return {"type": "shell", "commands": commands}


def _packages(machine: Machine) -> dict[str, object]:
    names = " ".join(machine.packages)
    if not names:
        return _shell(part("Debian's Python"), _REMOVE_FAMILY_PYTHON)
    install = f"DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends {names}"
    return _shell(part(f"packages {names}"), _REMOVE_FAMILY_PYTHON, "apt-get update", install)


def _users(machine: Machine) -> dict[str, object]:
    user = machine.user
    return _shell(
        part(f"user {user}, {workdir(machine)}"),
        f"id -u {user} > /dev/null 2>&1 || useradd --create-home --shell /bin/bash {user}",
        f"install -d -o {user} -g $(id -g {user}) -- {shlex.quote(workdir(machine))}",
    )


def _files(machine: Machine, family: Path) -> list[dict[str, object]]:
    steps: list[dict[str, object]] = []
    for number, (target, source) in enumerate(machine.files):
        name = f"{SOURCES}/{number}"
        copy = family / name
        try:
            if Path(source).is_dir():
                shutil.copytree(source, copy, symlinks=True)
                list_files(family, copy, called="the directory")
            else:
                shutil.copy(source, copy)
        except OSError as error:
            raise UsageError(f"{source} cannot be copied for {target}: {error.strerror or error}.") from error
        except TaskFamilyError as error:
            problem = error.message.replace(f"{name}/", "")
            raise UsageError(f"{source} cannot be copied for {target}: {problem}") from error
        steps.append({"type": "file", "source": name, "destination": target})
    return steps


def _services(machine: Machine, family: Path) -> list[dict[str, object]]:
    steps: list[dict[str, object]] = []
    for name, command in machine.services:
        # systemd replaces % and $ itself, and knows of JSON only the escapes (systemd.service, "Command lines").
        argument = json.dumps(command, ensure_ascii=False).replace("%", "%%").replace("$", "$$")
        unit = f"{name}.service"
        (family / SOURCES / unit).write_text(_UNIT.format(name=name, command=argument))
        steps.append({"type": "file", "source": f"{SOURCES}/{unit}", "destination": f"/etc/systemd/system/{unit}"})
        steps.append(_shell(part(f"service {name}"), f"systemctl enable {unit}"))
    return steps


# 2000-01-01: an archive's name comes from its bytes, and zip files can hold no time before 1980.
TIME = 946_684_800
# Inspect writes its logs where it is started, often into the eval's own directory. Copies of them would make another
# image of it for each eval, and hold the answers of earlier ones.
LOG_SUFFIX = ".eval"


def pack(source: Path, target: str, directory: Path) -> str:
    """Writes an archive with one member, or one directory, which has the name of the archive without `.tar`.

    Owner and group of all is root. Links are kept as they are. Inspect's logs are left out of a directory, with the
    directories in which nothing else is.

    Args:
        source: what is packed.
        target: the path of the archive in the machine, NAME.tar.
        directory: where the archive is written here.

    Returns:
        its path here.

    Raises:
        UsageError: a file cannot be read, or is neither a file, a directory nor a link.
    """
    path = directory / PurePosixPath(target).name
    root = source.resolve()

    def packed(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        inside = PurePosixPath(member.name).relative_to(path.stem)
        return None if inside.parts and _is_of_logs(root / inside) else _same_for_all(member)

    try:
        with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as archive:
            archive.add(root, path.stem, filter=packed)
    except OSError as error:
        raise UsageError(f"{error.filename or source} cannot be copied: {error.strerror or error}.") from error
    return str(path)


def _is_of_logs(path: Path) -> bool:
    """Returns whether a path is a log of Inspect, or a directory with logs alone."""
    if path.is_symlink() or not path.is_dir():
        return path.suffix == LOG_SUFFIX
    entries = list(path.iterdir())
    return bool(entries) and all(entry.suffix == LOG_SUFFIX for entry in entries)


def _same_for_all(member: tarfile.TarInfo) -> tarfile.TarInfo:
    if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
        raise UsageError(f"{member.name} is neither a file, a directory nor a link, and cannot be copied.")
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    member.mtime = TIME
    return member


PREFIX = "provisioner-inspect-"
# A directory is locked a moment after it was made.
YOUNG_SECONDS = 3600.0

# What the copies of files are made from, as far as a look at the files tells.
_Look = tuple[tuple[str, int, int, int], ...]

_families: dict[tuple[Machine, str, str, Pairs, _Look], TaskFamily] = {}
_lock = threading.Lock()


def family_of_machine(machine: Machine, internet: str, base_image: str = "", packed: Pairs = ()) -> TaskFamily:
    """Returns the family that makes a machine. It is written once, and again if files that it copies have changed.

    Args:
        base_image: as for plain_family.
        packed: from the paths of archives in the machine to what is in them here. Unlike files of a family, they have
            each file and link of a directory, empty directories and all modes.

    Raises:
        UsageError: a file that the configuration names does not exist or cannot be copied.
    """
    with _lock:
        # What packing leaves out changes while the eval runs.
        of_packed = tuple(line for line in _look(packed) if not line[0].endswith(LOG_SUFFIX))
        key = (machine, internet, base_image, packed, (*_look(machine.files), *of_packed))
        if key not in _families:
            directory = Path(tempfile.mkdtemp(dir=_directory()))
            try:
                with tempfile.TemporaryDirectory(dir=directory) as archives:
                    files = [(target, pack(Path(source), target, Path(archives))) for target, source in packed]
                    whole = machine.model_copy(update={"files": (*files, *machine.files)})
                    _families[key] = plain_family(whole, internet, directory, base_image)
            except BaseException:
                shutil.rmtree(directory, ignore_errors=True)
                raise
        return _families[key]


def _look(files: Pairs) -> _Look:
    # Of a link that is named, what it leads to is copied; of others, the link.
    paths = [(Path(source), True) for _, source in files]
    for _, source in files:
        for directory, _, names in os.walk(source):
            paths += [(Path(directory, name), False) for name in (".", *names)]
    lines = []
    for path, follows in paths:
        with contextlib.suppress(OSError):  # the copy reports it
            status = path.stat(follow_symlinks=follows)
            lines.append((str(path), status.st_mtime_ns, status.st_size, status.st_mode))
    return tuple(sorted(lines))


@cache
def _directory() -> Path:
    remove_abandoned()
    directory = tempfile.mkdtemp(prefix=PREFIX)
    _locked(directory)  # until this process ends, however it does
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return Path(directory)


def _locked(directory: str | Path) -> int | None:
    """Locks a directory and returns the descriptor that holds the lock; None if another process has it."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def remove_abandoned() -> None:
    """Removes the directories of this user's processes that were killed."""
    for directory in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            status = directory.lstat()
            if status.st_uid != os.geteuid() or abs(time.time() - status.st_mtime) < YOUNG_SECONDS:
                continue
            if (descriptor := _locked(directory)) is not None:
                shutil.rmtree(directory, ignore_errors=True)
                os.close(descriptor)


BASE_IMAGE = "debian-13"
# The same for every project, so that one layer serves all. apparmor has the profile of the engine's containers.
PACKAGES = ("docker.io", "docker-cli", "docker-compose", "docker-buildx", "apparmor")
ARCHIVES = f"{DIRECTORY}/images"
# Files of a build may hold solutions, and root in the machine can read the blocks that a removed file had.
_OVERWRITE = "shred --iterations=0 --zero"
_DAEMON = "/etc/docker/daemon.json"
# An archive of `docker save` names its images at its end, beside at most some hundred layers.
_MOST_MEMBERS = 100_000
_MOST_PIECE_BYTES = 1 << 20
# manifest.json names them, index.json (of OCI's image layout) has digests, too.
_DESCRIPTIONS = ("manifest.json", "index.json")
_IMAGE_NAME = "io.containerd.image.name"
_PINNED = re.compile(r"(?<![\w./:-])[\w./:-]+@sha256:[0-9a-f]{64}", re.ASCII)
_MOST_ARCHIVES = 1000
_MOST_UNPACKED_BYTES = 8 * MAXIMUM_TOTAL_BYTES
# A copy is a file of the machine's image before it is unpacked, then files of a build or of a layer, and a layer.
_DISK_PER_COPY = 4
_BASE_DISK_GIB = 12


def project_of(configuration: Configuration, metadata: Mapping[str, Any]) -> Project | None:
    """Returns the services of a configuration's compose file; None if it names none.

    Args:
        metadata: the sample's.

    Raises:
        UsageError: the file is not valid, or says what cannot be carried over; or an archive of `registry` has another
            image than the one that the file pins.
        HostError: there is no Compose to read it.
    """
    if not configuration.compose:
        return None
    has_internet = configuration.internet == "full" or bool(configuration.allow)
    file = read(configuration.compose, has_internet=has_internet)
    return _with_archives(translated(file, by_reference(metadata), has_internet=has_internet), configuration.registry)


def _with_archives(project: Project, registry: str) -> Project:
    """Returns a project in which a pinned image that an archive holds has the name that loading it gives it.

    The engine knows an image that it has loaded by its tag alone, and would pull it by a digest.
    """
    if not registry or is_url(registry):
        return project
    archives = _archives(Path(registry))
    names: dict[str, str] = {}
    digests: dict[str, str] = {}
    notes = []
    for pinned in sorted({*filter(_PINNED.fullmatch, project.images), *_PINNED.findall(project.dockerfiles)}):
        name, _, digest = pinned.partition("@")
        for path, own in [(path, images[full_name(name)]) for path, images in archives if full_name(name) in images]:
            if own not in ("", digest) or digests.setdefault(full_name(name), digest) != digest:
                raise UsageError(
                    f"{shown(pinned)}: {path} has another image of this name{own and f', {shown(own)}'}.",
                    hint=f"Pull what the file pins, `docker tag` it {name}, and write it with `docker save`.",
                )
            names[pinned] = name
            if not own:
                notes.append(f"{pinned} is taken from {path}, which does not have the digest: they were not compared.")
    run, build = json.loads(project.run), json.loads(project.build)
    for service in run["services"].values():
        service["image"] = names.get(service["image"], service["image"])
    contexts = {short_name(pinned): f"docker-image://{name}" for pinned, name in names.items()}
    for service in build["services"].values() if contexts else ():
        service["build"]["additional_contexts"] = {**service["build"].get("additional_contexts", {}), **contexts}
    return replace(
        project,
        run=json.dumps(run),
        build=json.dumps(build),
        images=tuple(dict.fromkeys(names.get(image, image) for image in project.images)),
        local=frozenset(names.get(image, image) for image in project.local),
        notes=(*project.notes, *notes),
    )


def engine_family(project: Project, configuration: Configuration) -> TaskFamily:
    """Returns the family that makes the machine of a configuration's compose file.

    Raises:
        UsageError: a file cannot be copied, or an image that is in archives alone is in none.
    """
    given = configuration.by_role["primary"]
    machine = machine_of(project, given, configuration.registry)
    packed = tuple((f"{DIRECTORY}/{name}.tar", source) for name, source in project.sources)
    family = family_of_machine(machine, configuration.internet, BASE_IMAGE, packed)
    return replace(family, hostname=given.name)


def machine_of(project: Project, machine: Machine, registry: str) -> Machine:
    """Returns the machine in which a project's containers run.

    Args:
        machine: what the configuration says of it beside the project.
        registry: a mirror's URL, or a directory of archives; empty for none.

    Raises:
        UsageError: an image that is in archives alone is in none.
    """
    mirror = registry if is_url(registry) else ""
    archives = [] if mirror or not registry else _needed(Path(registry), project)
    found = {image for _, images in archives for image in images}
    if missing := sorted(image for image in project.local if full_name(image) not in found):
        where = f"no archive in {registry} has it" if registry and not mirror else "`registry` names no directory"
        raise UsageError(
            f"{shown(missing[0])} is marked x-local, and {where}.",
            hint="Write it with `docker save --output DIRECTORY/NAME.tar IMAGE`, and set `registry: DIRECTORY`.",
        )
    files = [*machine.files]
    files += [(f"{ARCHIVES}/{number}.tar", str(path)) for number, (path, _) in enumerate(archives)]
    gib = (project.copied_bytes + sum(path.stat().st_size for path, _ in archives)) / (1 << 30)
    return machine.model_copy(
        update={
            "cpus": machine.cpus or project.cpus,
            "memory_gb": machine.memory_gb or project.memory_gb,
            "storage_gb": machine.storage_gb or math.ceil(_BASE_DISK_GIB + _DISK_PER_COPY * gib),
            "packages": (*PACKAGES, *machine.packages),
            "files": tuple(files),
            "run": (*machine.run, _script(project, mirror, archives)),
        }
    )


def _script(project: Project, mirror: str, archives: list[tuple[Path, Mapping[str, str]]]) -> str:
    """Returns the commands that bring the images into the engine, and leave nothing else."""
    build = f"{DIRECTORY}/build.json"
    builds = [*json.loads(project.build)["services"]]
    lines = [part("engine"), f"install -d -m 0700 {DIRECTORY}"]
    # Copies arrive as archives, which keep links, modes and empty directories.
    for name, _ in project.sources:
        archive = f"{DIRECTORY}/{name}.tar"
        lines += [f"tar -xf {archive} -C {DIRECTORY}", f"{_OVERWRITE} {archive}", f"rm {archive}"]
    if mirror:
        host = mirror.partition("://")[2].partition("/")[0]
        insecure = {"insecure-registries": [host]} if mirror.startswith("http://") else {}
        daemon = json.dumps({"registry-mirrors": [mirror], **insecure})
        lines += ["mkdir -p /etc/docker", f"printf %s {shlex.quote(daemon)} > {_DAEMON}", "systemctl restart docker"]
    lines.append("systemctl start docker")
    for number, (_, images) in enumerate(archives):
        archive = f"{ARCHIVES}/{number}.tar"
        lines += [part(f"load {' '.join(images)}"), f"docker load --input {archive}", f"rm {archive}"]
    if builds:
        lines.append(f"printf %s {shlex.quote(project.build)} > {build}")
        # One at a time: several at once have failed on an emulated CPU, where builds begin late for BuildKit.
        for name in builds:
            lines += [part(f"build {name}"), f"docker compose -f {build} build {name}"]
        lines += [f"{_OVERWRITE} {build}", f"rm {build}", "docker builder prune --all --force > /dev/null"]
    held = {name for _, images in archives for name in images}
    for image in project.images:
        if full_name(image) not in held:
            name = shlex.quote(image)
            lines += [part(f"pull {image}"), f"docker image inspect {name} > /dev/null 2>&1 || docker pull {name}"]
    lines.append(part("clean up"))
    if mirror:
        lines.append(f"rm {_DAEMON}")
    lines += [
        f"find {DIRECTORY} -path '{DIRECTORY}/context*' -type f -exec {_OVERWRITE} {{}} +",
        f"rm -rf {DIRECTORY}/context*",
        "systemctl stop docker.socket docker containerd",
    ]
    return "\n".join(lines)


def _archives(directory: Path) -> list[tuple[Path, Mapping[str, str]]]:
    """Returns a directory's archives, and the names of all their images with their digests."""
    if not directory.is_dir():
        raise UsageError(f"`registry` {directory} is neither a directory of archives nor the address of a mirror.")
    paths = sorted(path for path in directory.iterdir() if re.search(r"\.(tar|tgz|tar\.gz)$", path.name))
    if len(paths) > _MOST_ARCHIVES:
        raise UsageError(f"`registry` {directory} has {len(paths)} archives; at most {_MOST_ARCHIVES} are read.")
    return [(path, images_in(path)) for path in paths]


def _needed(directory: Path, project: Project) -> list[tuple[Path, Mapping[str, str]]]:
    """Returns the archives with images that a project uses, as _archives does."""
    wanted = {full_name(image) for image in project.images}

    def is_needed(image: str) -> bool:
        return image in wanted or any(name in project.dockerfiles for name in (image, image.removesuffix(":latest")))

    needed = [(path, images) for path, images in _archives(directory) if any(is_needed(image) for image in images)]
    size = sum(path.stat().st_size for path, _ in needed)
    if size > MAXIMUM_TOTAL_BYTES:
        raise UsageError(
            f"`registry` {directory}: the archives of this file's images have {size / (1 << 30):.1f} GiB, and at most "
            f"{MAXIMUM_TOTAL_BYTES >> 30} GiB can be copied into a machine."
        )
    return needed


class _Pieces:
    """Reads an archive in pieces that have a bound: a header of it may name any size, and be read as a whole.

    Args:
        file: the archive, uncompressed.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.tell = file.tell

    def read(self, size: int) -> bytes:
        """Reads up to so many bytes.

        Raises:
            tarfile.ReadError: they are more than an image's description has.
        """
        if size > _MOST_PIECE_BYTES:
            raise tarfile.ReadError(f"a header has more than {_MOST_PIECE_BYTES} bytes")
        return self._file.read(size)

    def seek(self, position: int) -> int:
        """Goes to a position, for which all before it is uncompressed.

        Raises:
            tarfile.ReadError: it lies further than any archive goes that can be loaded.
        """
        if position > _MOST_UNPACKED_BYTES:
            raise tarfile.ReadError(f"it has more than {_MOST_UNPACKED_BYTES >> 30} GiB")
        return self._file.seek(position)


def _unzipped(file: IO[bytes]) -> IO[bytes]:
    is_zipped = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    return cast(IO[bytes], gzip.GzipFile(fileobj=file)) if is_zipped else file


def images_in(archive: Path) -> Mapping[str, str]:
    """Returns the names of the images in an archive of `docker save`, which is read again only if it has changed.

    Returns:
        from each name to the digest that its registry has for it, as far as the archive tells; else to nothing.

    Raises:
        UsageError: it is no such archive.
    """
    try:
        status = archive.stat()
    except OSError as error:
        raise UsageError(f"{archive} cannot be read: {error.strerror}.") from error
    return _images_in(archive, (status.st_mtime_ns, status.st_size, status.st_ino))


@cache
def _images_in(archive: Path, state: tuple[int, ...]) -> Mapping[str, str]:  # `state` is a key of the cache only
    try:
        with (
            archive.open("rb") as raw,
            _unzipped(raw) as file,
            tarfile.open(fileobj=cast(IO[bytes], _Pieces(file)), mode="r:") as opened,
        ):
            found = _described(opened)
            manifest, index = found["manifest.json"], found.get("index.json", {})
            # Of an engine that keeps no compressed layers, the digests in the index are its own.
            digests = {} if any("LayerSources" in image for image in manifest) else _digests(index)
            names = [full_name(str(tag)) for image in manifest for tag in image["RepoTags"] or ()]
            return {name: digests.get(name, "") for name in names}
    except KeyError as error:
        raise UsageError(f"{archive} is no archive of `docker save`: it has no {error.args[0]}.") from error
    except (OSError, EOFError, zlib.error, tarfile.TarError, ValueError, TypeError, AttributeError) as error:
        raise UsageError(f"{archive} is no archive of `docker save`: {shown(str(error))}.") from error


def _described(opened: tarfile.TarFile) -> dict[str, Any]:
    """Returns what an archive says of its images, by the names of the files."""
    found: dict[str, Any] = {}
    for member in itertools.islice(opened, _MOST_MEMBERS):
        is_small = member.isreg() and member.size <= _MOST_PIECE_BYTES
        if is_small and member.name in _DESCRIPTIONS and (file := opened.extractfile(member)):
            found[member.name] = strict_json.parse(file.read(), limit_bytes=_MOST_PIECE_BYTES)
            if len(found) == len(_DESCRIPTIONS):
                break
    return found


def _digests(index: Mapping[str, Any]) -> dict[str, str]:
    images = [(each.get("annotations", {}).get(_IMAGE_NAME), each["digest"]) for each in index.get("manifests", ())]
    return {full_name(str(name)): str(digest) for name, digest in images if name}
