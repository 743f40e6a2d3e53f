"""QEMU's command line, and how a living QEMU is told from a file that one left."""

from __future__ import annotations

import fcntl
import itertools
import multiprocessing
import os
import signal
import socket
import struct
import subprocess
from dataclasses import replace
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest

from provisioner.clouds.local import machine
from provisioner.clouds.local.network import captures
from provisioner.clouds.local.vm import qemu
from provisioner.clouds.local.vm.processes import User
from provisioner.clouds.local.vm.qemu import (
    Launch,
    QMPError,
    captured,
    command,
    link_sockets,
    live_pid,
    paused_by_full_disk,
)
from tests.unit.fakes.qmp import serving
from tests.waiting import BOUND_SECONDS

LAUNCH = Launch(
    cpus=2, memory_mib=1024, kernel="/k", initrd="/i", kvm=False, link=(), internet_fd=None, user=None,
    disk_fds=(7, 8),
)  # fmt: skip
LINK = (("link.sock", "../aux/link.sock"),)
PROCESSES = multiprocessing.get_context("spawn")


def cards(argv: list[str]) -> list[str]:
    return [value for flag, value in itertools.pairwise(argv) if flag == "-netdev"]


def test_the_one_card_of_a_machine_that_is_alone_leads_to_our_end() -> None:
    assert cards(command(replace(LAUNCH, management_fd=4))) == ["tap,id=management,fd=4"]


def test_link_and_internet_are_cards_of_their_own() -> None:
    link, internet = cards(command(replace(LAUNCH, link=LINK, internet_fd=5)))[1:]
    assert "local.type=unix,local.path=link.sock" in link
    assert "addr.str=5" in internet


def test_the_primary_machine_is_the_hub_of_more_than_two() -> None:
    assert link_sockets("web", ("primary", "db")) == (("../.link/web.sock", "../.link/primary.web.sock"),)
    argv = command(replace(LAUNCH, link=link_sockets("primary", ("web", "db"))))
    assert [value.partition(",local.type")[0] for value in cards(argv)[1:]] == [
        "dgram,id=link0", "hubport,id=hub-link0,hubid=0,netdev=link0",
        "dgram,id=link1", "hubport,id=hub-link1,hubid=0,netdev=link1", "hubport,id=link,hubid=0",
    ]  # fmt: skip
    assert sum("netdev=link," in device for device in devices(argv)) == 1


def test_no_machine_runs_machines_of_its_own() -> None:
    argv = command(replace(LAUNCH, kvm=True))
    assert argv[argv.index("-cpu") + 1].split(",") == ["host", "vmx=off", "svm=off"]


def test_a_qemu_that_root_starts_becomes_another_user() -> None:
    argv = command(replace(LAUNCH, user=User(7, 8)))
    assert argv[argv.index("-runas") + 1] == "7:8"
    assert "spawn=deny" in argv[argv.index("-sandbox") + 1]
    assert "-runas" not in command(LAUNCH)


def devices(argv: list[str]) -> list[str]:
    return [value for flag, value in itertools.pairwise(argv) if flag == "-device"]


def test_a_resumed_machine_has_the_same_devices() -> None:
    template = command(replace(LAUNCH, memory="memory", internet_fd=3))
    clone = command(replace(LAUNCH, memory="/proc/self/fd/5", frozen=True, internet_fd=9))
    assert devices(template) == devices(clone)
    assert "share=on" in template[template.index("-object", template.index("-object") + 1) + 1]
    assert "memory-backend-file,id=pc.ram,size=1024M,mem-path=/proc/self/fd/5,share=off" in clone
    assert "-S" in clone  # nothing runs before its state is whole
    assert clone[clone.index("-incoming") + 1] == "defer"
    assert {"-S", "-incoming"}.isdisjoint(template)


def test_a_machine_has_another_generation_id_at_each_start() -> None:
    for frozen in (False, True):
        assert "vmgenid,guid=auto" in devices(command(replace(LAUNCH, memory="memory", frozen=frozen)))


def test_nothing_that_a_machine_is_told_is_in_its_arguments() -> None:
    argv = command(LAUNCH)
    assert "-smbios" not in argv
    assert "machine_id" not in " ".join(argv)


@pytest.mark.parametrize("kvm", [True, False])
def test_qemu_runs_in_its_sandbox_without_a_display(kvm: bool) -> None:
    argv = command(replace(LAUNCH, kvm=kvm))
    assert argv[argv.index("-sandbox") + 1].startswith("on,")
    assert {"-nodefaults", "-no-user-config"} <= set(argv)
    assert argv[argv.index("-display") + 1] == "none"
    assert not {"-monitor", "-vnc", "-spice", "-gdb"} & set(argv)


def test_an_emulated_machine_is_told_what_a_real_one_does_without() -> None:
    emulated, real = (" ".join(command(replace(LAUNCH, kvm=kvm))) for kvm in (False, True))
    for words in (",+aes", "mitigations=off", "no_timer_check", "-accel tcg,tb-size=128"):
        assert words in emulated
        assert words not in real
    assert "-accel kvm" in real


def hold(pidfile: Path, held: Event) -> None:
    with pidfile.open("w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        held.set()
        signal.pause()


def test_the_live_pid_is_that_of_the_lock_whatever_the_file_says(tmp_path: Path) -> None:
    pidfile = tmp_path / qemu.PIDFILE
    pidfile.parent.mkdir()
    assert live_pid(pidfile) is None
    pidfile.write_text(f"{os.getpid()}\n")
    assert live_pid(pidfile) is None  # a number that was used again
    held = PROCESSES.Event()
    holder = PROCESSES.Process(target=hold, args=(pidfile, held))
    holder.start()
    assert held.wait(BOUND_SECONDS)
    assert live_pid(pidfile) == holder.pid
    holder.kill()
    holder.join()
    assert live_pid(pidfile) is None


def hold_untold(pidfile: Path, held: Event) -> None:
    with pidfile.open("w") as file:
        whole_file = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, whole_file)
        held.set()
        signal.pause()


def test_a_lock_that_names_no_process_ends_its_holder_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "QUIT_SECONDS", BOUND_SECONDS)
    # A taken-over QEMU may change the lock: for such a one, the kernel says -1, which to kill() is every process.
    pidfile, held = tmp_path / qemu.PIDFILE, PROCESSES.Event()
    pidfile.parent.mkdir()
    pidfile.touch()
    with pidfile.open() as file:
        reader = subprocess.Popen(["sleep", "1000"], stdin=file)  # as a command that looks whether the machine lives
    holder = PROCESSES.Process(target=hold_untold, args=(pidfile, held))
    holder.start()
    assert held.wait(BOUND_SECONDS)
    assert live_pid(pidfile) == holder.pid
    machine.end(lambda: live_pid(pidfile))
    holder.join()
    assert reader.poll() is None
    reader.kill()
    reader.wait()
    assert holder.exitcode == -signal.SIGTERM
    assert live_pid(pidfile) is None


@pytest.mark.parametrize("pid", [qemu.UNTOLD, 0, 1])
def test_no_signal_is_sent_to_a_process_that_cannot_be_told(pid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.kill", lambda *_: pytest.fail("a signal is sent"))
    with pytest.raises(machine.MachineError, match="cannot be told"):
        machine.end(lambda: pid)


@pytest.mark.parametrize(
    ("answer", "paused"),
    [({"status": "io-error"}, True), ({"status": "running"}, False), ({"status": "paused"}, False), ([], False)],
    ids=["full", "running", "paused", "strange"],
)
def test_a_machine_that_qemu_paused_is_known_by_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Any, paused: bool
) -> None:
    monkeypatch.setattr(qemu, "STATUS_SECONDS", BOUND_SECONDS)
    with serving(tmp_path, {"query-status": answer}):
        assert paused_by_full_disk(tmp_path) is paused


def test_a_qemu_that_is_gone_or_busy_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qemu, "STATUS_SECONDS", 0.1)
    assert not paused_by_full_disk(tmp_path)
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as busy:
        Path(qemu.RUN).mkdir()
        busy.bind(qemu.CONTROL)
        busy.listen()
        assert not paused_by_full_disk(tmp_path)


def test_qemu_says_its_version(tmp_path: Path) -> None:
    answer = {"qemu": {"major": 7, "minor": 2, "micro": 19}, "package": "Debian"}
    with serving(tmp_path, {"query-version": answer}), qemu.QMP(tmp_path) as qmp:
        assert qmp.version() == "7.2.19"


@pytest.mark.parametrize(
    "answer",
    ["7.2", {}, {"qemu": "7"}, {"qemu": {"major": 7, "minor": "\x1b", "micro": 0}}, {"qemu": {"major": 10**9}}],
    ids=["text", "nothing", "no-numbers", "escape", "huge"],
)
def test_a_version_that_is_none_is_refused(tmp_path: Path, answer: Any) -> None:
    with serving(tmp_path, {"query-version": answer}), qemu.QMP(tmp_path) as qmp, pytest.raises(QMPError):
        qmp.version()


def test_two_cards_are_captured_and_management_never() -> None:
    assert captured((), None) == []
    assert captured(LINK, 5) == [
        *("-object", "filter-dump,id=capture-link,netdev=link,file=run/link.pcap,maxlen=2048"),
        *("-object", "filter-dump,id=capture-internet,netdev=internet,file=run/internet.pcap,maxlen=2048"),
    ]
    assert captured((*LINK, *LINK), None)[1].startswith("filter-dump,id=capture-link,netdev=link,")
    assert set(captures.CARDS) == {"link", "internet"}
