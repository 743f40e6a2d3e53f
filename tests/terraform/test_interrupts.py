"""Tests Terraform and its controller when they are interrupted, killed, or compete with others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from provisioner.errors import Interrupted, TerraformError
from provisioner.store.locks import is_locked
from provisioner.terraform.stack import Stack
from tests.terraform.conftest import Site, silent, wait_until

ROOT = Path(__file__).parents[2]
# Ignores signals, and starts a child that ignores them too.
STUBBORN = """#!/bin/sh
case "$1" in init) exit 0;; esac
trap '' {ignored}
echo $$ > leader
sh -c 'trap "" {ignored}; echo $$ > child; while :; do sleep 0.1; done' &
while :; do sleep 0.1; done
"""
CONTROLLER = """
import sys
from pathlib import Path
from provisioner.terraform.stack import Stack
sys.executable = sys.argv[2]
Stack(Path(sys.argv[1])).apply(lambda _: None)
"""


def interrupt_when(condition: str, path: Path) -> threading.Thread:
    """Sends this process Ctrl-C as soon as a file exists."""

    def watch() -> None:
        wait_until(path.exists)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=watch, name=condition)
    thread.start()
    return thread


def lives(pid: int) -> bool:
    """Returns whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def start_controller(site: Site) -> subprocess.Popen[bytes]:
    """Starts another process that applies the stack."""
    real = os.path.realpath(f"/proc/{os.getpid()}/exe")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    return subprocess.Popen(
        [real, "-c", CONTROLLER, str(site.directory), sys.executable], env=environment, start_new_session=True
    )


def stubborn_terraform(site: Site, monkeypatch: pytest.MonkeyPatch, ignored: str) -> None:
    """Puts a program that ignores some signals in Terraform's place."""
    program = site.root / "stubborn"
    program.write_text(STUBBORN.format(ignored=ignored))
    program.chmod(0o755)
    monkeypatch.setenv("PROVISIONER_TERRAFORM", str(program))


def test_an_interrupted_apply_is_raised_and_what_it_made_can_be_destroyed(site: Site) -> None:
    site.write(site.spec("one"))
    site.sleep("one")
    watcher = interrupt_when("start runs", site.root / "one" / "primary" / "started")
    with pytest.raises(KeyboardInterrupt):
        site.stack.apply(silent)
    watcher.join()
    assert not is_locked(site.directory / "terraform.lock")
    site.stack.remove({"one"}, silent)
    assert site.done("destroy") == ["one/primary"]


@pytest.mark.parametrize("ignored", ["INT", "INT TERM"])
def test_a_terraform_that_does_not_listen_is_ended_with_all_that_it_started(
    site: Site, monkeypatch: pytest.MonkeyPatch, ignored: str
) -> None:
    stubborn_terraform(site, monkeypatch, ignored)
    monkeypatch.setattr("provisioner.terraform.stack.process.TERMINATE_SECONDS", 0.3)
    site.write(site.spec("one"))
    watcher = interrupt_when("child runs", site.directory / "child")
    with pytest.raises(KeyboardInterrupt):
        Stack(site.directory, patience_seconds=0.3).apply(silent)
    watcher.join()
    pids = [int((site.directory / name).read_text()) for name in ("leader", "child")]
    assert [lives(pid) for pid in pids] == [False, False]


def test_terraform_runs_in_a_session_of_its_own(site: Site) -> None:
    site.write(site.spec("one"))
    controller = start_controller(site)
    sleep = site.sleep("one")
    wait_until(lambda: bool(site.done("start")))
    start = next(entry["pid"] for entry in site.journal if entry["operation"] == "start")
    session = os.getsid(start)
    sleep.unlink()
    assert controller.wait(20) == 0
    assert session not in (os.getsid(0), controller.pid)


def test_terraform_outlives_a_killed_controller_and_records_what_it_makes(site: Site) -> None:
    site.write(site.spec("one"), site.spec("two"))
    sleep = site.sleep("one")
    controller = start_controller(site)
    wait_until(lambda: "one/primary" in site.done("start"))
    controller.kill()
    controller.wait()
    sleep.unlink()
    wait_until(lambda: not is_locked(site.directory / "terraform.lock"))
    outputs = site.stack.apply(silent)
    assert site.done("start") == ["one/primary", "two/primary"]
    assert sorted(outputs["environments"]) == ["one", "two"]


def test_removing_ends_the_terraform_of_a_killed_controller_first(site: Site) -> None:
    site.write(site.spec("one"))
    site.sleep("one")
    controller = start_controller(site)
    wait_until(lambda: bool(site.done("start")))
    controller.kill()
    controller.wait()
    began = time.monotonic()
    site.stack.remove({"one"}, silent)
    start = next(entry["pid"] for entry in site.journal if entry["operation"] == "start")
    assert not lives(start)
    assert site.done("destroy") == ["one/primary"]
    assert time.monotonic() - began < 60


def test_removing_ends_what_a_killed_terraform_left_running(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("provisioner.terraform.stack.process.TERMINATE_SECONDS", 0.3)
    site.write(site.spec("one"))
    site.sleep("one")
    controller = start_controller(site)
    wait_until(lambda: bool(site.done("start")))
    start = next(entry["pid"] for entry in site.journal if entry["operation"] == "start")
    controller.kill()
    controller.wait()
    os.kill(os.getsid(start), signal.SIGKILL)
    assert is_locked(site.directory / "terraform.lock")
    Stack(site.directory, patience_seconds=0.3).remove({"one"}, silent)
    assert not lives(start)


def test_a_stack_at_rest_has_no_terraform_that_goes_on_creating(site: Site) -> None:
    site.write(site.spec("one"))
    site.sleep("one")
    controller = start_controller(site)
    wait_until(lambda: bool(site.done("start")))
    controller.kill()
    controller.wait()
    assert is_locked(site.directory / "terraform.lock")
    Stack(site.directory, patience_seconds=0.3).rest(silent)
    assert not is_locked(site.directory / "terraform.lock")


def test_what_is_checked_while_terraform_runs_interrupts_it(site: Site) -> None:
    site.write(site.spec("one"))
    site.sleep("one")

    def check() -> None:
        if site.done("start"):
            raise Interrupted("enough")

    with pytest.raises(Interrupted):
        Stack(site.directory, patience_seconds=0.3, check=check).apply(silent)
    assert not is_locked(site.directory / "terraform.lock")


def test_a_second_controller_says_that_it_waits_and_then_has_its_turn(site: Site) -> None:
    site.write(site.spec("one"))
    sleep = site.sleep("one")
    controller = start_controller(site)
    wait_until(lambda: bool(site.done("start")))
    notes: list[str] = []

    def tell(text: str) -> None:
        notes.append(text)
        sleep.unlink()

    site.stack.remove({"one"}, tell)
    assert controller.wait(20) == 0
    assert len(notes) == 1
    assert "waiting" in notes[0].lower()
    assert site.done("destroy") == ["one/primary"]


def test_two_controllers_may_remove_two_environments_of_one_stack_at_once(site: Site) -> None:
    site.write(site.spec("one"), site.spec("two"), site.spec("three"))
    site.stack.apply(silent)
    threads = [
        threading.Thread(target=Stack(site.directory).remove, args=(name, silent)) for name in ("one", "two", "three")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert site.done("destroy") == ["one/primary", "three/primary", "two/primary"]
    assert not site.directory.exists()


def test_a_machine_that_fails_to_start_does_not_keep_the_other_from_starting(site: Site) -> None:
    site.write(site.spec("one", ("primary", "aux")))
    (site.root / "one" / "fail-aux").touch()
    with pytest.raises(TerraformError, match="local-exec"):
        site.stack.apply(silent)
    assert (site.root / "one" / "primary" / "endpoint.json").exists()
