"""Makes container images without registry or engine: a small Debian, as `docker save` writes it."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import tarfile
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
_PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# What the Docker Hub's image has, too, and evals and Inspect's checks use.
_OPTIONS = ["--quiet", "--variant=essential", "--include=adduser"]
_OPTIONS += [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "locale", "man")]


def registry_of_archives() -> str:
    """Returns a directory of archives, with that of an image `debian:12`."""
    return str(debian_archive(cache()).parent)


def debian_archive(cache: Path) -> Path:
    """Returns an archive of an image `debian:12`, made once by mmdebstrap.

    Args:
        cache: a directory that is kept between test runs.
    """
    archive = cache / "containers" / "debian-12.tar"
    if not archive.exists():
        archive.parent.mkdir(parents=True, exist_ok=True)
        root = archive.with_name(f"root-{os.getpid()}.tar")
        try:
            subprocess.run(["mmdebstrap", *_OPTIONS, "bookworm", root, "http://deb.debian.org/debian"], check=True)
            save(root, DEBIAN, archive)
        finally:
            root.unlink(missing_ok=True)
    return archive


def save(root: Path, image: str, archive: Path) -> None:
    """Writes an image of one layer as `docker save` does.

    Args:
        root: an archive of its file system.
        image: its name and tag.
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
    manifest = json.dumps([{"Config": name, "RepoTags": [image], "Layers": [f"{layer}.tar"]}]).encode()
    unfinished = archive.with_name(f"{archive.name}-{os.getpid()}")
    with tarfile.open(unfinished, "w") as out:
        out.add(root, f"{layer}.tar")
        for member, data in ((name, config), ("manifest.json", manifest)):
            info = tarfile.TarInfo(member)
            info.size = len(data)
            out.addfile(info, io.BytesIO(data))
    unfinished.rename(archive)
