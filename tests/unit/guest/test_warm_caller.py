"""Tests a warm interpreter that is hostile, broken, or attacked."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.unit.guest.machine_directory import Machine
from tests.unit.guest.warm_machine import WARM, is_there, is_warm, wait_until, with_python


def test_a_server_that_hangs_is_ended_and_does_nothing_later(warm: Machine) -> None:
    pid = warm.server()
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()

    answer = warm.score(f"open('times', 'a').write('x')\nreturn {WARM}")

    assert answer.value is False
    assert time.monotonic() - began < 30
    wait_until(lambda: not is_there(pid))
    assert (warm.family / "times").read_text() == "x"
    assert is_warm(warm) is True


FOREIGN = """
import os, socket, sys, time
os.chdir(sys.argv[1])
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind("socket")
listener.listen()
print("listens", flush=True)
while True:
    connection, _ = listener.accept()
    connection.send(sys.argv[2].encode())
    if len(sys.argv) > 3:
        connection.close()
"""
WRONG = ["", "process 0", "process 1", "process -5", "process x", "ended 0", "go", "x" * 10_000, "process 9999999"]


@pytest.mark.parametrize("answer", WRONG, ids=lambda answer: answer[:20] or "nothing")
def test_a_server_that_answers_wrongly_is_ended(machine: Machine, answer: str) -> None:
    with_python(machine)
    machine.warm.mkdir(mode=0o700, parents=True)
    argv = [sys.executable, "-c", FOREIGN, str(machine.warm), answer, *([] if answer else ["close"])]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as foreign:
        assert foreign.stdout is not None
        assert foreign.stdout.readline() == b"listens\n"
        try:
            assert is_warm(machine) is False
            assert foreign.wait(30) == -signal.SIGKILL
        finally:
            foreign.kill()
    assert is_warm(machine) is True


def test_whoever_waits_for_a_fork_may_be_killed_by_it(warm: Machine) -> None:
    answer = warm.score("import os, time\nos.kill(os.getppid(), 9)\ntime.sleep(300)")

    assert (answer.result["kind"], answer.result["exit_code"]) == ("exit", -9)
    assert is_warm(warm) is True


def test_a_server_whose_place_is_taken_is_replaced_by_a_new_one(warm: Machine) -> None:
    old = warm.server()
    (warm.warm / "socket").unlink()
    assert is_warm(warm) is False

    assert warm.server() != old
    with contextlib.suppress(ProcessLookupError):
        os.kill(old, signal.SIGKILL)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_reaches_nothing_of_it(warm: Machine) -> None:
    pid = warm.server()
    attack = f"""
import ctypes, os, signal, socket
os.setgroups([]); os.setgid(65534); os.setuid(65534)
def reach():
    socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect({str(warm.warm / "socket")!r})
def trace():
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(16, {pid}, 0, 0):
        raise OSError(ctypes.get_errno(), "ptrace")
attempts = [
    reach, trace, lambda: os.kill({pid}, signal.SIGTERM), lambda: os.readlink("/proc/{pid}/exe"),
    lambda: open("/proc/{pid}/environ").read(), lambda: open("/proc/{pid}/mem", "r+b"),
    lambda: os.listdir("/proc/{pid}/fd"), lambda: os.listdir({str(warm.warm)!r}),
    lambda: os.pidfd_open({pid}) and signal.pidfd_send_signal(os.pidfd_open({pid}), signal.SIGTERM),
]
for attempt in attempts:
    try:
        attempt()
        print("reached", attempts.index(attempt))
    except PermissionError:
        pass
print("tried")
"""
    for path in (warm.root, *warm.root.parents):  # nothing but its own directory shall protect it
        if path.stat().st_uid == 0 and str(path).startswith("/tmp/"):
            path.chmod(0o755)

    tried = subprocess.run([sys.executable, "-c", attack], capture_output=True, text=True, check=False)

    assert (tried.stdout, tried.stderr) == ("tried\n", "")
    assert is_warm(warm) is True
