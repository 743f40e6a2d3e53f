"""Compares the disks of the base images with what Debian itself installs. No machine boots."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from provisioner.base.models import BaseImage
from provisioner.base.progress import Silence
from provisioner.session import Session
from provisioner.store.images import Image
from tests.pages import lacked_by_base_images, matches
from tests.waiting import BOUND_SECONDS

pytestmark = pytest.mark.vm

KINDS = [BaseImage(role="primary"), BaseImage(role="aux")]


def base_image(session: Session, kind: BaseImage) -> Image:
    """Returns a base image's record; builds the image if need be."""
    return session.images.load(session.cloud.base_image(kind, Silence()))


def debugfs(session: Session, image: Image, commands: list[str]) -> str:
    """Looks at the file system of an image's disk, and returns what the commands could not find."""
    environment = {"PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin", "LC_ALL": "C"}
    done = subprocess.run(
        ["debugfs", "-f", "-", session.images.disk(image.name)], input="\n".join(commands), env=environment, text=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=True, timeout=BOUND_SECONDS,
    )  # fmt: skip
    return done.stderr


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.role)
def test_a_base_image_has_the_files_that_the_reference_names(
    lab_session: Session, kind: BaseImage, tmp_path: Path
) -> None:
    session, image = lab_session, base_image(lab_session, kind)
    debugfs(session, image, [f"rdump /var/lib/dpkg/info {tmp_path}"])
    lists = (tmp_path / "info").glob("*.list")
    files = {line for path in lists for line in path.read_text().splitlines()}
    assert {"/etc/update-motd.d/10-uname", "/usr/bin/apt-get"} <= files
    said = debugfs(session, image, [f'stat "{file}"' for file in sorted(files)])
    gone = re.findall(r"^(/.*): File not found", said, re.MULTILINE)
    assert {file for file in gone if matches(file, lacked_by_base_images())} == set(gone)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.role)
def test_the_reference_names_packages_that_debian_has(lab_session: Session, kind: BaseImage, tmp_path: Path) -> None:
    session, image = lab_session, base_image(lab_session, kind)
    debugfs(session, image, [f"rdump /var/lib/apt/lists {tmp_path}"])
    [packages] = (tmp_path / "lists").glob("*_debian_dists_bookworm_main_*_Packages")
    paragraphs = packages.read_text().split("\n\n")
    needed = {"cloud-init"} | {
        paragraph.split("\n")[0].removeprefix("Package: ")
        for paragraph in paragraphs
        if re.search(r"^Priority: (required|important)$", paragraph, re.MULTILINE)
    }
    assert {"apt", "cron"} <= needed
    installed = {package.partition(":")[0] for package in image.packages}
    named = {name for name in lacked_by_base_images() if not name.startswith("/")}
    assert needed - installed <= named
    assert installed & named == set()
