"""Tests what is seen of the processes beside a machine, with a program in QEMU's place."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from provisioner.base.errors import IsolationError
from provisioner.clouds.local import surface
from provisioner.clouds.local.vm import bubblewrap, processes, qemu
from tests.unit.fakes.qmp import serving
from tests.waiting import until

VERSION = {"qemu": {"major": 7, "minor": 2, "micro": 22}}


def function(slot: int, device: int, **changes: Any) -> dict[str, Any]:
    return {"bus": 0, "slot": slot, "function": 0, "id": {"vendor": 0x1AF4, "device": device}, **changes}


def seen(directory: Path, devices: Any) -> Any:
    with serving(directory, {"query-version": VERSION, "query-pci": devices}):
        return surface.look(directory, "primary")


def note(directory: Path, pid: int) -> None:
    (directory / qemu.PROCESS).write_text(f"{pid} {processes.start_time(pid)}")


@pytest.fixture
def enclosed(tmp_path: Path) -> Iterator[Path]:
    """The directory of a machine whose QEMU is an enclosed program."""
    process, pid = bubblewrap.start(bubblewrap.command("sleep"), ["sleep", "1000"], ())
    until(lambda: Path(f"/proc/{pid}/comm").read_text() == "sleep\n")  # bubblewrap tells the pid before it is done
    note(tmp_path, pid)
    yield tmp_path
    os.kill(pid, signal.SIGKILL)  # bubblewrap, which waits for it, then ends, too
    process.wait()


def test_an_enclosed_process_and_its_devices_are_seen(enclosed: Path) -> None:
    found = seen(enclosed, [{"bus": 0, "devices": [function(1, 0x1000), function(2, 0x1100)]}])
    assert (found.accelerator, found.qemu, found.passt, found.proxy_process) == ("TCG", "7.2.22", "", None)
    assert found.devices == ("00:01.0 virtio-net", "00:02.0 1af41100")
    assert {"ipc", "mnt", "pid", "uts"} <= set(found.qemu_process.namespaces)
    assert "net" not in found.qemu_process.namespaces
    assert (found.qemu_process.uid, found.qemu_process.capabilities) == (os.geteuid(), "0" * 16)
    assert found.qemu_process.no_new_privileges
    assert list(found.differences()) == ["QEMU does not run under two seccomp filters"]


def test_a_process_that_is_not_enclosed_differs_and_its_proxy_too(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "1000"]) as process:
        note(tmp_path, process.pid)
        proxy = {"pid": process.pid, "started": processes.start_time(process.pid)}
        (tmp_path / "network.json").write_text(json.dumps(proxy))
        found = seen(tmp_path, [])
        process.kill()
    assert found.qemu_process.namespaces == found.proxy_process.namespaces == ()
    assert found.passt
    assert len(list(found.differences())) >= 7  # root has capabilities, too


@pytest.mark.parametrize(
    "devices",
    [
        1,
        [1],
        [{"devices": [function(1, 0x1000)] * 65}],
        [{"devices": [function(1, 0x1000, bus=1 << 3000)] * 64}],
        [{"devices": [function(1, 0x1000, bus=float("inf"))]}],
        [{"devices": [function(1, 0x1000, id={})]}],
        [{"devices": [function(1, 0x1000, id=["vendor"])]}],
    ],
    ids=["number", "list", "many", "long", "infinite", "no-id", "id"],
)
def test_an_answer_that_is_none_of_qemus_is_a_short_error(enclosed: Path, devices: Any) -> None:
    with pytest.raises(IsolationError, match="the primary machine meets cannot be seen") as raised:
        seen(enclosed, devices)
    assert len(str(raised.value)) < 300


def test_a_qemu_that_has_ended_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(IsolationError, match="QEMU does not run"):
        surface.look(tmp_path, "primary")
