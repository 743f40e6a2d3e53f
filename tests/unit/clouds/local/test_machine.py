"""The end of a local machine that was cut short while it started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from provisioner.clouds.local import machine
from provisioner.clouds.local.frozen import templates
from provisioner.clouds.local.vm import qemu
from provisioner.clouds.local.vm.credential_port import CREDENTIALS
from provisioner.store.home import TEMPLATES
from tests.waiting import BOUND_SECONDS, until

# Stands in for a QEMU that resumes from any template, and whose machine never asks for anything.
SILENT_QEMU = """#!/usr/bin/python3
import fcntl, os, socket
pidfile = open("qemu.pid", "w")
fcntl.lockf(pidfile, fcntl.LOCK_EX)
server = socket.socket(socket.AF_UNIX)
server.bind("qmp.sock")
server.listen()
while True:
    client, _ = server.accept()
    stream = client.makefile("rwb", buffering=0)
    stream.write(b'{"QMP": {}}\\n')
    for line in stream:
        if b"block_resize" in line:
            open("goes_on", "w").close()
        stream.write(b'{"return": {"status": "completed"}}\\n')
"""


def test_a_qemu_that_has_not_yet_locked_its_pidfile_is_ended_too(tmp_path: Path) -> None:
    directory = tmp_path / "primary"
    directory.mkdir()
    # Stands for a QEMU in its first moment: it has inherited the file, and written nothing yet.
    with (directory / machine.OPEN_FILE).open("wb") as inherited:
        young = subprocess.Popen(["sleep", "60"], pass_fds=[inherited.fileno()])
    try:
        machine.destroy(directory)
        assert young.wait(BOUND_SECONDS) != 0
        assert not directory.exists()
    finally:
        young.kill()
        young.wait()


def test_a_machine_that_is_gone_is_destroyed_again_silently(tmp_path: Path) -> None:
    machine.destroy(tmp_path / "primary")


@pytest.mark.parametrize("moment", ["goes_on", f"{CREDENTIALS}/machine_id"], ids=["QEMU runs", "QEMU is to come"])
def test_a_destroy_does_not_wait_for_a_start_without_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    programs = tmp_path / "bin"
    for path, text in (
        (programs / "qemu-system-x86_64", SILENT_QEMU),
        (programs / "qemu-img", "#!/bin/sh\nsleep 1\ntouch $9\n"),
    ):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    image, directory = tmp_path / "image", tmp_path / "environment" / "primary"
    for path in (image / "disk.raw", image / "vmlinuz", image / "initrd.img", directory / CREDENTIALS / "hostname"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    (directory / "accelerator").write_text("tcg")
    (directory / machine.PEERS).touch()
    (directory / machine.WANTS_TEMPLATE).touch()
    (directory / "expires_at").write_text(str(time.time() + 300))
    settings = {
        "image": str(image / "disk.raw"), "cpus": 1, "memory_gib": 2 / 1024, "disk_gib": 1, "public_key": "x",
        "full_internet": False, "allowed_destinations": [],
    }  # fmt: skip
    key = templates.key(image / "disk.raw", machine.described(directory, settings))
    template = templates.Template(image / TEMPLATES / key)
    template.directory.mkdir(parents=True, mode=0o700)
    for path in (template.memory, template.state, template.disk, template.console):
        path.touch(mode=0o600)
        os.truncate(path, 2 << 20)
    templates.complete(template.directory)
    values = {"PROVISIONER_MACHINE": json.dumps(settings), "PROVISIONER_MACHINE_DIRECTORY": str(directory)}
    start = subprocess.Popen(
        [sys.executable, "-m", machine.__name__, "start"],
        env={**os.environ, **values},
        stderr=subprocess.PIPE,
        text=True,
    )
    with start:
        until((directory / moment).exists, lambda: start.poll() is None)
        machine.destroy(directory)
        assert "it was destroyed while it started" in start.communicate()[1]
        assert start.returncode == 1
    assert not directory.exists()
    assert template.state.exists()  # it served


@pytest.mark.parametrize("part", templates.CHECKED)
def test_a_damaged_template_is_thrown_away_before_qemu_sees_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    template = templates.Template(tmp_path / "image" / "template")
    template.directory.mkdir(parents=True)
    for path in (template.memory, template.state, template.disk, template.console):
        path.write_bytes(b"x" * 100)
    templates.complete(template.directory)
    (template.directory / part).write_bytes(b"x" * 99 + b"y")
    (tmp_path / "primary" / CREDENTIALS).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "primary")
    monkeypatch.setattr(machine, "_start_qemu", lambda *_: pytest.fail("QEMU was started"))
    launch = qemu.Launch(
        cpus=1, memory_mib=1, kernel="k", initrd="i", kvm=False, link=(), internet_fd=None, user=None
    )  # fmt: skip
    origin = machine._start_from_template({}, launch, template)
    assert origin.startswith(f"boot: the template did not work and was deleted: {part} is damaged")
    assert not template.directory.exists()
