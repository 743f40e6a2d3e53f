"""Tests a whole environment on Debian 13, which its family's manifest asks for."""

from __future__ import annotations

import json
import re

import pytest

from provisioner.base.models import BaseImage, Distribution
from provisioner.base.progress import Silence
from provisioner.environment import lifecycle
from provisioner.session import Session
from provisioner.store.images import Image
from tests.local.conftest import environment_of

pytestmark = pytest.mark.vm

KERNEL = re.compile(r"linux-image-[0-9]")
# The Unix sockets of sshd, and what listens for TCP connections.
LISTENING = "ss -Hxl | grep -o '[^ ]*ssh[^ ]*' ; ss -Htln | awk '{ print $4 }'"


def base_image(session: Session, distribution: Distribution) -> Image:
    """Returns a base image's record; builds the image if need be."""
    return session.images.load(
        session.cloud.base_image(BaseImage(role="primary", distribution=distribution), Silence())
    )


def kernels(image: Image) -> set[str]:
    """Returns the versions of an image's kernels, as `uname -r` shows them."""
    return {name.removeprefix("linux-image-").partition(":")[0] for name in image.packages if KERNEL.match(name)}


def test_a_family_on_debian_13_comes_up_from_its_own_template(lab_session: Session) -> None:
    session = lab_session
    newer = base_image(session, "debian-13")
    with environment_of(session, "newer", "main") as lab:
        assert lab.environment.endpoints["primary"].origin == "template"
        assert lab.environment.machines["primary"].distribution == "debian-13"
        assert session.images.load(lab.environment.machines["primary"].image).base == newer.name
        kernel, version, tmp, *_ = lab.text("uname -r; . /etc/os-release; echo $VERSION_ID; stat -fc %T /tmp").split()
        assert (version, tmp) == ("13", "ext2/ext3")
        assert {kernel} == kernels(newer)
        # QEMU's generation id told the kernel that it resumed in a copy of its machine.
        assert "random: crng reseeded due to virtual machine fork" in lab.text("dmesg")
        assert lab.text(LISTENING).split() == ["0.0.0.0:22", "[::]:22"]
        # Neither Python is Debian's, which the family has removed.
        ours = "/usr/lib/provisioner/python3 -I -S -c 'import sys; print(*sys.version_info[:2])'"
        assert lab.text(ours).split() == ["3", "13"]
        found = json.loads(lab.text("cat /opt/python.json"))
        assert (found["version"], found["program"]) == ([3, 13], "/usr/local/bin/python3")
        assert (found["prefix"], found["site-packages"]) == ("/usr/local", "/usr/local/lib/python3.13/site-packages")
        assert not any("dist-packages" in path for path in found["path"])
        assert {name.partition("-")[0] for name in found["distributions"]} >= {"pip", "pytest", "metr_task_standard"}
        assert lab.text("python --version", user="agent").startswith("Python 3.13.")
        _, outcome = lifecycle.score(session, lab.environment, "13", readmit_agent=True)
        assert outcome.score == 1.0
    assert not session.environments.directory(lab.environment.id).exists()


def test_debian_13_has_another_kernel_than_debian_12(lab_session: Session) -> None:
    older, newer = (base_image(lab_session, which) for which in ("debian-12", "debian-13"))
    assert older.name.rpartition("-")[0] != newer.name.rpartition("-")[0]
    assert len(kernels(older) | kernels(newer)) == 2
