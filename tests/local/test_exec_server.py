"""Tests the exec server in a machine: its bounds, its users, what it ends, and its own end."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from provisioner.base.errors import MachineLostError
from provisioner.base.models import Environment
from provisioner.environment import lifecycle
from provisioner.family.loader import load_family
from provisioner.machines.connect import connect
from provisioner.session import Session
from provisioner.ssh.calls import SOCKET
from provisioner.ssh.connection import Connection

pytestmark = [pytest.mark.vm, pytest.mark.xdist_group("exec")]
FAMILY = Path(__file__).parents[1] / "contract" / "families" / "echo"
BOMB = "bomb() { bomb | bomb & }; bomb; sleep 1000"
CALLS = "ls -d /sys/fs/cgroup/provisioner/call-*"
SERVER = "systemctl show --property=MainPID --value provisioner-exec.service"


@pytest.fixture(scope="module")
def environment(open_session: Callable[[Mapping[str, str]], Session]) -> Iterator[tuple[Session, Environment]]:
    session = open_session({})
    environment = lifecycle.up(session, load_family(FAMILY), "main")
    yield session, environment
    lifecycle.destroy(session, environment)


@pytest.fixture(scope="module")
def root(environment: tuple[Session, Environment]) -> Iterator[Connection]:
    with connect(*environment, "primary") as connection:
        yield connection


def text(connection: Connection, script: str, user: str = "root") -> str:
    return connection.run(["bash", "-c", script], user=user).stdout.decode().strip()


def test_two_hundred_calls_at_once_on_one_connection(root: Connection) -> None:
    def call(number: int) -> bytes:
        script = 'read -r line; sleep 2; echo "$line $0"'
        done = root.run(["sh", "-c", script, str(number)], stdin=b"line\n", timeout_seconds=900)
        assert done.exit_code == 0, done.stderr
        return done.stdout

    with ThreadPoolExecutor(200) as pool:
        assert list(pool.map(call, range(200))) == [b"line %d\n" % number for number in range(200)]
    deadline = time.monotonic() + 60
    while text(root, f"{CALLS} | wc -l") != "1":  # its own
        assert time.monotonic() < deadline


def test_large_inputs_and_many_arguments(root: Connection) -> None:
    data = os.urandom(50 << 20)
    done = root.run(["sha256sum"], stdin=data, timeout_seconds=900)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.decode().split()[0] == hashlib.sha256(data).hexdigest()
    root.write_file("/root/large/file", data)
    assert text(root, "sha256sum < /root/large/file").split()[0] == hashlib.sha256(data).hexdigest()
    assert root.read_file("/root/large/file", 50 << 20, remove=True) == data
    arguments = ["x" * 50] * 20_000
    assert root.run(["sh", "-c", 'echo "$#"; echo "$*" | wc -c', "sh", *arguments]).stdout == b"20000\n1020000\n"
    too_many = root.run(["true", *["x" * 1000] * 3000])
    assert (too_many.exit_code, too_many.errno) == (127, 7)


def test_a_call_has_its_users_login_and_what_it_was_given(root: Connection) -> None:
    show = 'id -un; id -Gn; pwd; umask; echo "$HOME $USER $GIVEN"; cat; cut -d- -f1 /proc/self/cgroup'
    done = root.run(["sh", "-c", show], user="agent", environment={"GIVEN": "a b"}, stdin=b"in\n")
    assert done.stdout.decode().splitlines() == [
        "agent", "agent", "/home/agent", "0022", "/home/agent agent a b", "in", "0::/agent/call",
    ]  # fmt: skip
    assert text(root, "pwd; cut -d- -f1 /proc/self/cgroup") == "/root\n0::/provisioner/call"
    assert root.run(["pwd"], user="agent", cwd="/var/tmp").stdout == b"/var/tmp\n"
    # Processes in the background are still there, in their call's cgroup.
    assert text(root, "sleep 999 < /dev/null > /dev/null 2>&1 & echo begun") == "begun"
    assert text(root, "pkill -x sleep && echo there") == "there"


def test_only_root_may_call(root: Connection) -> None:
    program = f"import socket\nsocket.socket(socket.AF_UNIX).connect({SOCKET!r})\n"
    done = root.run(["connect.py"], program=program, user="agent")
    assert (done.exit_code, b"PermissionError" in done.stderr) == (1, True)


@pytest.mark.parametrize("number", [1, 9, 15], ids=str)
def test_a_signal_is_an_exit_code(root: Connection, number: int) -> None:
    assert root.run(["sh", "-c", f"kill -{number} $$"]).exit_code == 128 + number


def test_what_cannot_start_is_said_with_its_errno(root: Connection) -> None:
    assert text(root, "echo x > /tmp/plain; echo x > /tmp/odd; chmod 755 /tmp/odd") == ""
    calls = {
        "program": (root.run(["no-such-program"]), 127, 2),
        "permission": (root.run(["/tmp/plain"]), 126, 13),
        "format": (root.run(["/tmp/odd"]), 126, 8),
        "user": (root.run(["true"], user="nobody-knows"), 127, 2),
        "directory": (root.run(["true"], cwd="/nowhere"), 127, 2),
        "closed directory": (root.run(["true"], cwd="/root", user="agent"), 127, 13),
    }
    assert {name: (done.exit_code, done.errno) for name, (done, *_) in calls.items()} == {
        name: (code, number) for name, (_, code, number) in calls.items()
    }
    assert b"nobody-knows" in calls["user"][0].stderr
    for path, number in {"/nowhere": 2, "/root": 13, "/tmp": 21, "/etc/passwd": 27}.items():
        with pytest.raises(OSError, match=path) as error:
            root.read_file(path, 10, user="agent")
        assert error.value.errno == number
    with pytest.raises(PermissionError):
        root.write_file("/root/new", b"", user="agent")


@pytest.mark.parametrize("user", ["root", "agent"])
def test_a_fork_bomb_is_ended_whole_at_its_time_limit(root: Connection, user: str) -> None:
    with pytest.raises(TimeoutError):
        root.run(["bash", "-c", BOMB], user=user, timeout_seconds=10)
    deadline = time.monotonic() + 120
    while text(root, "pgrep -c -f 'bomb[(]'") != "0":
        assert time.monotonic() < deadline
    assert text(root, "echo as before", user) == "as before"


def test_roots_call_may_use_nearly_all_memory_and_processes(root: Connection) -> None:
    show = (
        "cd /sys/fs/cgroup$(cut -d: -f3 /proc/self/cgroup) && cat memory.max pids.max "
        "/proc/sys/kernel/threads-max /proc/sys/kernel/pid_max && grep MemTotal /proc/meminfo | tr -cd 0-9"
    )
    memory_max, pids_max, threads, pids, total_kib = (int(number) for number in text(root, show).split())
    total = total_kib << 10
    assert 0 <= total - max(64 << 20, total // 20) - memory_max < 4096  # the kernel counts in pages
    assert pids_max == min(threads, pids) * 3 // 4


def test_a_memory_hog_of_roots_is_ended_and_nothing_else(root: Connection) -> None:
    server = text(root, SERVER)
    boot = text(root, "cat /proc/sys/kernel/random/boot_id")
    assert text(root, "setsid sleep 997 < /dev/null > /dev/null 2>&1 & echo begun") == "begun"
    hog = root.run(["tail", "/dev/zero"], timeout_seconds=300)  # it keeps all of a line that never ends
    assert hog.exit_code == 128 + 9, hog.stderr
    assert text(root, "pkill -f 'sleep 99[7]' && echo there") == "there"
    assert (text(root, SERVER), text(root, "cat /proc/sys/kernel/random/boot_id")) == (server, boot)
    assert text(root, "echo as before", "agent") == "as before"


def test_what_a_call_started_ends_with_its_channel(environment: tuple[Session, Environment], root: Connection) -> None:
    class Stop(Exception):
        pass

    def stop(_: bytes) -> None:
        raise Stop

    with connect(*environment, "primary") as connection, pytest.raises(Stop):
        connection.run(["bash", "-c", "setsid sleep 998 & echo begun; wait"], on_stdout=stop)
    deadline = time.monotonic() + 60
    while text(root, "pgrep -x sleep"):
        assert time.monotonic() < deadline


def test_a_server_that_dies_is_started_again_once(root: Connection) -> None:
    first = text(root, SERVER)
    assert text(root, f"kill -KILL {first}; sleep 1; echo lived on") == "lived on"
    second = text(root, SERVER)
    assert second not in (first, "0")
    assert text(root, f"kill -KILL {second}; echo said") == "said"
    with pytest.raises(MachineLostError, match="exec server has ended"):
        root.run(["true"])
