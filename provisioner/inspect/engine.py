"""Makes a machine with a Docker Engine of a compose project: packages, copies, and the commands that fetch its images.

The engine is Debian 13's, with Compose 2: Debian 12's is older than Inspect's own docker sandbox allows.
"""

from __future__ import annotations

import gzip
import itertools
import json
import math
import re
import shlex
import tarfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import IO, Any, cast

from provisioner import strict_json
from provisioner.errors import UsageError
from provisioner.family.files import MAXIMUM_TOTAL_BYTES
from provisioner.family.loader import TaskFamily
from provisioner.images.provisioning import part
from provisioner.inspect.build_order import full_name, short_name
from provisioner.inspect.compose import is_url, read
from provisioner.inspect.compose_project import DIRECTORY, Project, translated
from provisioner.inspect.configuration import Configuration, Machine, by_reference
from provisioner.inspect.plain_family import family_of_machine
from provisioner.validation import shown

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
        return image in wanted or any(name in project.dockerfiles for name in _spellings(image))

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


def _spellings(image: str) -> Iterable[str]:
    """Returns the ways in which a Dockerfile may name an image."""
    return (image, image.removesuffix(":latest"))
