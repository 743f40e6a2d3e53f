"""Tests how a machine's want of memory is told."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest

from provisioner.inspect.memory import PROGRAM, shortage
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


class _Machines:
    pass


def _told(said: Any, machines: object | None = None) -> list[str]:
    stdout = json.dumps(said).encode()
    connection = SimpleNamespace(run=lambda *_, **__: Completed(0, stdout, b""))
    return shortage(machines or _Machines(), cast(Calls, connection), 2, {ID: "the service web"})


def test_a_machine_that_is_full_is_told_with_process_size_and_setting() -> None:
    [told] = _told([[MACHINE.format(number=3)], CALM])
    assert told == (
        "For want of memory the kernel ended java (process 812) in the service web: the machine's 2 GiB are full; "
        "raise `memory_gb` of its machine (under `x-provisioner` in a compose file)."
    )


def test_the_limit_of_a_container_is_told_apart_and_words_are_printable() -> None:
    [told] = _told([[LIMIT], CALM])
    assert "(process 5) in the service web: it has reached the limit of its container" in told
    assert told.isprintable()


def test_each_end_is_told_once() -> None:
    machines = _Machines()
    assert len(_told([[MACHINE.format(number=3)], CALM], machines)) == 1
    assert len(_told([[MACHINE.format(number=number) for number in (3, 4)], CALM], machines)) == 1


def test_pressure_is_told() -> None:
    [told] = _told([[], FULL])
    assert told.startswith("The machine's 2 GiB of memory are full: for 62 % of the last minute")


@pytest.mark.parametrize("said", [[], {}, [[1, "x"], CALM], [["no kill"], "x"], "x"])
def test_false_words_of_a_machine_are_no_want_of_memory(said: Any) -> None:
    assert _told(said) == []


def test_the_program_says_what_this_kernel_says() -> None:
    done = subprocess.run([sys.executable, "-I", "-c", PROGRAM], capture_output=True, check=False)
    if done.returncode == 0:  # only root may read the kernel's words
        kills, pressure = json.loads(done.stdout)
        assert isinstance(kills, list)
        assert "full avg10" in pressure
    else:
        assert b"Permission" in done.stderr or b"kmsg" in done.stderr
