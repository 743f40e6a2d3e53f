"""Makes container images without registry or engine: small Debian systems, as `docker save` writes them."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path

from tests.homes import cache

DEBIAN = "debian:12"
# What evals of the tests build of it.
DOCKERFILE = """
FROM debian:12
RUN useradd --create-home agent && echo built > /built
ENV COLOUR=red
WORKDIR /srv/work
"""
# Images of the Docker Hub that Inspect's own tests want, and the packages of the Debian that stands in for them.
PYTHON = ("python:3.12-bookworm", "python:3.13-bookworm", "ubuntu:24.04", "aisiuk/inspect-tool-support:latest")
_OF_PYTHON = "python3,python-is-python3,curl,procps"
_PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# What the Docker Hub's image has, too, and evals and Inspect's checks use.
_OPTIONS = ["--quiet", "--variant=essential", "--include=adduser"]
_OPTIONS += [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "locale", "man")]


def registry_of_archives() -> str:
    """Returns a directory of archives, with that of an image `debian:12`."""
    return str(debian_archive(cache()).parent)


def registry_with_python() -> str:
    """Returns a directory of archives, with the images that Inspect's own tests want."""
    return str(_archive(cache(), "python/debian-python.tar", PYTHON, f"--include={_OF_PYTHON}").parent)


def debian_archive(cache: Path) -> Path:
    """Returns an archive of an image `debian:12`, made once by mmdebstrap.

    Args:
        cache: a directory that is kept between test runs.
    """
    return _archive(cache, "debian-12.tar", (DEBIAN,))


def _archive(cache: Path, name: str, images: Sequence[str], *options: str) -> Path:
    archive = cache / "containers" / name
    if not archive.exists():
        archive.parent.mkdir(parents=True, exist_ok=True)
        root = archive.with_name(f"root-{os.getpid()}.tar")
        try:
            words: list[str | Path] = [
                "mmdebstrap",
                *_OPTIONS,
                *options,
                "bookworm",
                root,
                "http://deb.debian.org/debian",
            ]
            subprocess.run(words, check=True)
            save(root, images, archive)
        finally:
            root.unlink(missing_ok=True)
    return archive


def save(root: Path, images: Sequence[str], archive: Path) -> None:
    """Writes an image of one layer as `docker save` does.

    Args:
        root: an archive of its file system.
        images: its names and tags.
    """
    with root.open("rb") as file:
        layer = hashlib.file_digest(file, "sha256").hexdigest()
    config = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Cmd": ["bash"], "Env": [_PATH]},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer}"]},
        }
    ).encode()
    name = f"{hashlib.sha256(config).hexdigest()}.json"
    manifest = json.dumps([{"Config": name, "RepoTags": [*images], "Layers": [f"{layer}.tar"]}]).encode()
    unfinished = archive.with_name(f"{archive.name}-{os.getpid()}")
    with tarfile.open(unfinished, "w") as out:
        out.add(root, f"{layer}.tar")
        for member, data in ((name, config), ("manifest.json", manifest)):
            info = tarfile.TarInfo(member)
            info.size = len(data)
            out.addfile(info, io.BytesIO(data))
    unfinished.rename(archive)
