"""The start of a local machine that is cut short, and the end of one that has taken its QEMU over."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from provisioner.base.config import Settings
from provisioner.clouds.local import machine, watchdog
from provisioner.clouds.local.cloud import LocalCloud
from provisioner.clouds.local.frozen import templates
from provisioner.clouds.local.vm import machine_logs, qemu
from provisioner.clouds.local.vm.credential_port import CREDENTIALS
from provisioner.clouds.local.vm.processes import start_time
from provisioner.store.files import write_atomically
from provisioner.store.home import TEMPLATES, Home
from tests.command_line import ROOT
from tests.unit.fakes.world import environment
from tests.waiting import BOUND_SECONDS, until

# Stands in for QEMU: locks its pidfile, and answers its control socket.
QEMU = """#!/usr/bin/python3
import fcntl, os, signal, socket
pidfile = open("run/qemu.pid", "w")
fcntl.lockf(pidfile, fcntl.LOCK_EX)
server = socket.socket(socket.AF_UNIX)
server.bind("run/qmp.sock")
server.listen()
asked = False
def visitor():
    client, _ = server.accept()
    stream = client.makefile("rwb", buffering=0)
    stream.write(b'{"QMP": {}}\\n')
    return stream
"""
# It resumes from any template, and its machine never asks for anything.
SILENT_QEMU = f"""{QEMU}
while True:
    stream = visitor()
    for line in stream:
        if b"block_resize" in line:
            open("run/goes_on", "w").close()
        stream.write(b'{{"return": {{"status": "completed"}}}}\\n')
"""
# A machine has taken it over: it gives up its pidfile, what it has inherited, and its directory.
TAKEN_OVER_QEMU = f"""{QEMU}
while not asked:
    stream = visitor()
    for line in stream:
        asked = asked or b"qmp_capabilities" in line
        stream.write(b'{{"return": {{}}}}\\n')
os.closerange(0, 100)
directory = os.getcwd()
os.chdir("/")
open(f"{{directory}}/run/taken_over", "w").close()
signal.pause()
"""


def prepare(directory: Path, image: Path, monkeypatch: pytest.MonkeyPatch, *texts: str) -> dict[str, Any]:
    """Prepares a machine as the controller does, and returns its settings.

    Args:
        texts: the programs that stand in for QEMU and qemu-img.
    """
    programs = image.with_name("bin")
    programs.mkdir()
    for name, text in zip(("qemu-system-x86_64", "qemu-img"), texts, strict=True):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    for path in (image / "disk.raw", image / "vmlinuz", image / "initrd.img", directory / CREDENTIALS / "hostname"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    (directory / "accelerator").write_text("tcg")
    (directory / machine.PEERS).touch()
    (directory / watchdog.EXPIRY).write_text(str(time.time() + 300))
    return {
        "image": str(image / "disk.raw"), "cpus": 1, "memory_gib": 2 / 1024, "disk_gib": 1, "public_key": "x",
        "full_internet": False, "allowed_destinations": [],
    }  # fmt: skip


def starting(directory: Path, settings: dict[str, Any]) -> subprocess.Popen[str]:
    values = {"PROVISIONER_MACHINE": json.dumps(settings), "PROVISIONER_MACHINE_DIRECTORY": str(directory)}
    return subprocess.Popen(
        [sys.executable, "-m", machine.__name__, "start"],
        env={**os.environ, **values, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )


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
        machine.destroy(directory)  # silently
    finally:
        young.kill()
        young.wait()


def test_a_private_address_that_vanishes_before_it_is_read_fails_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "primary"
    settings = prepare(directory, tmp_path / "image", monkeypatch, "", "")
    (directory / machine.ORIGIN).write_text(machine.BOOT)
    (directory / CREDENTIALS / "private_address").write_text("10.0.0.2/30")
    monkeypatch.setenv("PROVISIONER_MACHINE", json.dumps(settings))
    monkeypatch.chdir(directory)  # as the start does, which is undone by this
    monkeypatch.setattr(qemu, "live_pid", lambda _: os.getpid())
    read_text = Path.read_text

    def read(path: Path, *args: Any, **named: Any) -> str:
        if path.name == "private_address":
            path.unlink()
        return read_text(path, *args, **named)

    monkeypatch.setattr(Path, "read_text", read)
    machine._start(directory)
    endpoint = json.loads((directory / "endpoint.json").read_text())
    assert (endpoint["host"], endpoint["private_address"]) == ("10.0.2.15", None)


def test_what_cannot_be_told_keeps_no_other_process_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "primary"
    directory.mkdir()
    monkeypatch.setattr(qemu, "live_pid", lambda _: qemu.UNTOLD)
    proxy = subprocess.Popen(["sleep", "1000"])
    (directory / "network.json").write_text(json.dumps({"pid": proxy.pid, "started": start_time(proxy.pid)}))
    with (directory / machine.OPEN_FILE).open("wb") as inherited:
        young = subprocess.Popen(["sleep", "1000"], pass_fds=[inherited.fileno()])
    try:
        with pytest.raises(machine.MachineError, match="cannot be told"):
            machine.destroy(directory)
        assert proxy.wait(BOUND_SECONDS) != 0
        assert young.wait(BOUND_SECONDS) != 0
        assert directory.exists()  # the sign that something is still there
    finally:
        for process in (proxy, young):
            process.kill()
            process.wait()


@pytest.mark.parametrize("moment", ["run/goes_on", f"{CREDENTIALS}/machine_id"], ids=["QEMU runs", "QEMU is to come"])
def test_a_destroy_does_not_wait_for_a_start_without_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    image, directory = tmp_path / "image", tmp_path / "environment" / "primary"
    settings = prepare(directory, image, monkeypatch, SILENT_QEMU, "#!/bin/sh\nsleep 1\ntouch $9\n")
    (directory / machine.WANTS_TEMPLATE).touch()
    key = templates.key(image / "disk.raw", machine.described(directory, settings))
    template = templates.Template(image / TEMPLATES / key)
    template.directory.mkdir(parents=True, mode=0o700)
    for path in (template.directory / name for name in (*templates.CHECKED, templates.CONSOLE)):
        path.touch(mode=0o600)
        os.truncate(path, 2 << 20)
    templates.complete(template.directory)
    with starting(directory, settings) as start:
        until((directory / moment).exists, lambda: start.poll() is None)
        machine.destroy(directory)
        assert "it was destroyed while it started" in start.communicate()[1]
        assert start.returncode == 1
    assert not directory.exists()
    assert (template.directory / templates.STATE).exists()  # it served


@pytest.mark.parametrize("part", templates.CHECKED)
def test_a_damaged_template_is_thrown_away_before_qemu_sees_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    template = templates.Template(tmp_path / "image" / "template")
    template.directory.mkdir(parents=True)
    for path in (template.directory / name for name in (*templates.CHECKED, templates.CONSOLE)):
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


@pytest.fixture
def taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, int]]:
    """A machine's directory, and a descriptor of its QEMU, which the machine has taken over: no lock tells of it."""
    directory = tmp_path / "home" / "environments" / "env" / "primary"
    settings = prepare(directory, tmp_path / "image", monkeypatch, TAKEN_OVER_QEMU, "#!/bin/sh\ntouch $9\n")
    with starting(directory, settings) as start:
        assert start.communicate()[1] == ""
    assert start.returncode == 0
    until((directory / "run" / "taken_over").exists)
    descriptor = os.pidfd_open(int((directory / qemu.PROCESS).read_text().split()[0]))
    yield directory, descriptor
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    os.close(descriptor)


def ended(qemu_process: int) -> bool:
    return bool(select.select([qemu_process], [], [], 0)[0])


def test_a_qemu_that_gave_up_its_lock_is_not_gone(taken_over: tuple[Path, int], tmp_path: Path) -> None:
    _, qemu_process = taken_over
    local = LocalCloud(Home(tmp_path / "home"), Settings())
    assert local.alive(environment("env"), "primary")
    assert "QEMU process" in local.remaining(environment("env"))[0]
    local.remove(environment("env"))
    until(lambda: ended(qemu_process))
    assert local.remaining(environment("env")) == []


def test_a_sweep_ends_a_qemu_that_has_left_its_directory(taken_over: tuple[Path, int], tmp_path: Path) -> None:
    _, qemu_process = taken_over
    local = LocalCloud(Home(tmp_path / "home"), Settings())
    [orphan] = local.list_resources(None)
    assert any("QEMU" in resource for resource in orphan.resources)
    assert local.delete_resources(orphan)
    until(lambda: ended(qemu_process))
    assert local.list_resources(None) == []


def wait_for_a_round(directory: Path, qemu_process: int) -> None:
    """Waits until the watchdog has looked at all that it looks at, logs first, or has ended QEMU."""
    log, long = directory / machine_logs.SERIAL, b"x" * (2 * machine_logs.LIMIT_BYTES)
    for _ in range(2):
        write_atomically(log, long.decode())
        until(lambda: log.stat().st_size < len(long) or ended(qemu_process))


@pytest.mark.parametrize("is_named", [True, False])
def test_a_qemu_that_gave_up_its_lock_ends_only_with_its_ttl(taken_over: tuple[Path, int], is_named: bool) -> None:
    directory, qemu_process = taken_over
    wait_for_a_round(directory, qemu_process)
    if not is_named:
        (directory / qemu.PROCESS).rename(directory / "away")  # as if it could not be read
        wait_for_a_round(directory, qemu_process)
    assert not ended(qemu_process)
    write_atomically(directory / watchdog.EXPIRY, "0")
    until(lambda: ended(qemu_process))
