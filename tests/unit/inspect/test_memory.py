"""Tests how it is told that a machine is out of memory."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from provisioner.inspect.memory import PROGRAM, Watch, on_console
from provisioner.models import Role
from provisioner.ssh.calls import Calls
from provisioner.ssh.exchange import Completed

ID = "ab" * 32
MACHINE = (
    "6,{number},1234,-;oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,"
    "task_memcg=/system.slice/docker-" + ID + ".scope,task=java,pid=812,uid=0"
)
LIMIT = (
    "6,7,1234,-;oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=x,mems_allowed=0,"
    "oom_memcg=/system.slice/docker-" + ID + ".scope,task_memcg=/system.slice/docker-" + ID + ".scope/call-1-2,"
    "task=a,b\x1b[0m,pid=5,uid=1000"
)
CALM = "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
FULL = CALM.replace("full avg10=0.00 avg60=0.00", "full avg10=80.00 avg60=61.50")


def _watch() -> Watch:
    watch = Watch()
    watch.services = {ID: "web"}
    return watch


def _told(said: Any, watch: Watch | None = None, role: Role = "primary") -> list[str]:
    stdout = json.dumps(said).encode()
    connection = SimpleNamespace(run=lambda *_, **__: Completed(0, stdout, b""))
    return (watch or _watch()).look(role, cast(Calls, connection), 2)


def test_a_machine_that_is_full_is_told_with_process_size_and_setting() -> None:
    [told] = _told([[MACHINE.format(number=3)], CALM, {}])
    assert told == (
        "The kernel ended java (process 812) in the service web, out of memory: the machine's 2 GiB are full; raise "
        "`memory_gb` of its machine (in a compose file: `x-provisioner`, `machines`)."
    )


def test_the_limit_of_a_container_is_told_apart_and_words_are_printable() -> None:
    [told] = _told([[LIMIT], CALM, {}])
    assert (
        "(process 5) in the service web, out of memory: it has reached the container's own limit; raise `mem_limit`"
        in told
    )
    assert told.isprintable()


def test_the_limit_of_all_containers_is_the_machines() -> None:
    limit = LIMIT.replace(f"oom_memcg=/system.slice/docker-{ID}.scope", "oom_memcg=/containers.slice")
    [told] = _told([[limit], CALM, {}])
    assert "in the service web, out of memory: the machine's 2 GiB are full; raise `memory_gb`" in told


def test_each_end_is_told_once() -> None:
    watch = _watch()
    assert len(_told([[MACHINE.format(number=3)], CALM, {}], watch)) == 1
    assert len(_told([[MACHINE.format(number=number) for number in (3, 4)], CALM, {}], watch)) == 1


def test_pressure_is_told() -> None:
    [told] = _told([[], FULL, {}])
    assert told.startswith("The machine's 2 GiB of memory are full: for 62 % of the last minute")


def test_another_machines_kernel_has_lines_of_its_own() -> None:
    watch, said = _watch(), [[MACHINE.format(number=3)], CALM, {}]
    assert [len(_told(said, watch, role)) for role in ("primary", "aux", "aux")] == [1, 1, 0]
    assert len(watch.sentences) == 2


def test_a_time_has_what_was_told_of_one_machine_since() -> None:
    watch = _watch()
    [early] = _told([[MACHINE.format(number=3)], CALM, {}], watch)
    begin = time.monotonic()
    [late] = _told([[MACHINE.format(number=4).replace("java", "tail")], CALM, {}], watch)
    _told([[MACHINE.format(number=3)], CALM, {}], watch, "aux")
    assert watch.since("primary", begin) == [late]
    assert watch.since("primary", 0) == [early, late]


def test_a_machine_that_invents_lines_takes_no_more_memory() -> None:
    watch = _watch()
    for look in range(100):
        assert len(_told([[MACHINE.format(number=f"{look}{number}") for number in range(9)], CALM, {}], watch)) == 5
    assert len(watch.sentences) == 100
    assert sum(map(len, watch._lines.values())) == 100
    assert _told([[MACHINE.format(number="1" * 5000)], CALM, {}], watch) == []


def test_services_that_were_started_again_are_counted() -> None:
    watch = _watch()
    assert _told([[], CALM, {ID: 3, "cd" * 32: 5}], watch) == []
    assert watch.restarts == {"web": 3}


@pytest.mark.parametrize(
    "said",
    [[], {}, [[1, "x"], CALM, {}], [["no kill"], "x", {ID: "1"}], "x", [[], CALM, {ID: -1}], [[], CALM, {ID: 10**9}]],
)
def test_false_words_of_a_machine_tell_nothing(said: Any) -> None:
    watch = _watch()
    assert (_told(said, watch), watch.restarts) == ([], {})


def test_a_console_says_what_the_kernel_ended_last() -> None:
    lines = [f"[   {number}.0] Out of memory: Killed process {number} (ja\x1bva) total-vm:9kB" for number in (7, 812)]
    told = on_console("\n".join(["[    1.0] booted", *lines, "[  820.0] login:"]))
    assert "Its console says: [   812.0] Out of memory: Killed process 812 (ja" in told
    assert "memory_gb" in told
    assert told.isprintable()
    assert on_console("[    1.0] booted") == ""


def test_the_program_says_what_this_kernel_says() -> None:
    done = subprocess.run([sys.executable, "-I", "-c", PROGRAM], capture_output=True, check=False)
    if done.returncode == 0:  # only root may read the kernel's words
        kills, pressure, restarts = json.loads(done.stdout)
        assert isinstance(kills, list)
        assert "full avg10" in pressure
        assert isinstance(restarts, dict)
    else:
        assert b"Permission" in done.stderr or b"kmsg" in done.stderr


def test_the_program_passes_over_files_of_containers_that_go_or_change(tmp_path: Path) -> None:
    (tmp_path / "kmsg").write_text(MACHINE.format(number=3))
    (tmp_path / "pressure").write_text(CALM)
    files = {"cut": '{"RestartCount": ', "new": "{}", ID: '{"RestartCount": 2}'}
    for name in ("gone", *files):
        config = tmp_path / "containers" / name / "config.v2.json"
        config.parent.mkdir(parents=True)
        config.write_text(files[name]) if name in files else config.symlink_to("removed")
    program = PROGRAM
    for path, instead in (
        ("/dev/kmsg", "kmsg"), ("/var/lib/docker/containers", "containers"), ("/proc/pressure/memory", "pressure")
    ):  # fmt: skip
        program = program.replace(path, str(tmp_path / instead))
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, check=True)
    assert json.loads(done.stdout) == [[MACHINE.format(number=3)], CALM, {ID: 2}]
