"""Compares forks of the warm interpreter with interpreters that were just started, as the family sees them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.unit.guest.families.probes import PROBES
from tests.unit.guest.machine_directory import Answer, Machine

FAMILY = Path(__file__).parent / "families/probes.py"
# The command line of whoever waits for this process: a fork of the warm interpreter, or the helper.
WARM = "open(f'/proc/{__import__(\"os\").getppid()}/cmdline').read().endswith('child\\0')"
PROBED = {
    "LANG": "C.UTF-8",
    "TZ": "Asia/Tokyo",
    "SOME": "thing",
    "PYTHONHASHSEED": "7",
    "PYTHONWARNINGS": "error::UserWarning",
}


def with_python(machine: Machine) -> Machine:
    """Give a machine a Python of its own, which a test may change."""
    venv.create(machine.root / "python", symlinks=True)
    machine.path = f"{machine.root}/python/bin:{os.defpath}"
    settle()
    return machine


def settle() -> None:
    """Wait until what was just written is older than an interpreter that starts now, by a clock that ticks."""
    time.sleep(0.05)


@pytest.fixture
def warm(machine: Machine) -> Machine:
    """Returns a machine with a Python of its own and a warm interpreter of it."""
    with_python(machine)
    assert is_warm(machine) is False
    assert is_warm(machine) is True
    return machine


def is_warm(machine: Machine, **keys: Any) -> bool:
    """Score, and return whether that was in a fork of a warm interpreter."""
    value = machine.score(f"return {WARM}", **keys).value
    assert isinstance(value, bool)
    return value


def server(machine: Machine) -> int:
    """Return the process of the warm interpreter."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        directory = os.open(machine.warm, os.O_RDONLY)
        connection.connect(f"/proc/self/fd/{directory}/socket")
        os.close(directory)
        return int.from_bytes(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4), sys.byteorder)


def is_there(pid: int) -> bool:
    """Return whether a process runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, str]]]:
    """Yields what the family sees in a first process, in a fork of the warm one, and in one without any of that."""
    machine = with_python(Machine(tmp_path_factory.mktemp("machine")))
    shutil.copy(FAMILY, machine.family / "fam.py")

    def look() -> dict[str, str]:
        answer = machine.run("start", environment=PROBED)
        assert answer.value is None
        found: dict[str, str] = json.loads(answer.stdout)
        return found

    first = look()
    forked_by = server(machine)
    later = [look() for _ in range(2)][1]
    assert server(machine) == forked_by
    machine.end()
    machine.warm.chmod(0o755)
    yield {"first": first, "later": later, "fresh": look()}
    assert not (machine.warm / "socket").exists()


@pytest.mark.parametrize("name", PROBES)
def test_a_fork_sees_what_a_fresh_interpreter_sees(seen: dict[str, dict[str, str]], name: str) -> None:
    assert seen["later"][name] == seen["fresh"][name]


@pytest.mark.parametrize("name", PROBES)
def test_the_process_that_leaves_a_warm_one_behind_sees_it_too(seen: dict[str, dict[str, str]], name: str) -> None:
    assert seen["first"][name] == seen["fresh"][name]


def test_a_fork_is_of_the_warm_interpreter(warm: Machine) -> None:
    pid = server(warm)

    assert [is_warm(warm) for _ in range(3)] == [True] * 3
    assert server(warm) == pid
    assert warm.run("intermediate_score").result["status"] == "error"  # the family has none, and says so
    assert server(warm) == pid


@pytest.mark.parametrize(
    ("body", "exit_code"),
    [
        ("__import__('sys').exit(3)", 3),
        ("__import__('sys').exit()", 0),
        ("__import__('os')._exit(4)", 4),
        ("__import__('os')._exit(0)", 0),
        ("import os\nos.kill(os.getpid(), 9)", -9),
        ("import os\nos.kill(os.getpid(), 15)", -15),
        ("import os\nos.killpg(0, 9)", -9),
        ("import os\nos.abort()", -6),
        ("import ctypes\nctypes.string_at(0)", -11),
    ],
)
def test_a_forks_end_is_told_as_that_of_a_fresh_interpreter(warm: Machine, body: str, exit_code: int) -> None:
    forked = warm.score(body)
    assert (forked.result["kind"], forked.result["exit_code"]) == ("exit", exit_code)

    assert is_warm(warm) is True
    warm.end()
    warm.warm.chmod(0o755)
    fresh = warm.score(body)
    assert (forked.result, forked.stdout, forked.stderr) == (fresh.result, fresh.stdout, fresh.stderr)


def test_exceptions_and_their_tracebacks_are_the_same(warm: Machine) -> None:
    forked = warm.score("raise ValueError(submission)").result
    warm.end()
    warm.warm.chmod(0o755)

    assert forked["traceback"]
    assert forked == warm.score("raise ValueError(submission)").result


def test_what_runs_at_exit_runs_and_its_output_comes(warm: Machine) -> None:
    answer = warm.score("import atexit\natexit.register(print, 'at exit')\nprint('first', end=' ')\nreturn 1.0")

    assert (answer.value, answer.stdout) == (1.0, "first at exit\n")


def test_a_fork_of_the_fork_that_comes_back_gives_no_second_result(warm: Machine) -> None:
    body = "import os\npid = os.fork()\nif pid: os.waitpid(pid, 0)\nreturn 1.0 if pid else 2.0"

    assert warm.score(body).value == 1.0


def test_the_time_limit_ends_a_fork_and_its_children(warm: Machine) -> None:
    body = "import subprocess\nc = subprocess.Popen(['sleep', '300'])\nopen('child', 'w').write(str(c.pid))\nc.wait()"
    warm.write_family(f"@staticmethod\ndef start(t):\n    {body.replace(chr(10), chr(10) + '    ')}\n")

    assert warm.run("start", timeout_seconds=3).result["kind"] == "timeout"
    wait_until(lambda: not is_there(int((warm.family / "child").read_text())))
    assert is_warm(warm) is True


def test_daemons_of_a_fork_live_on_and_hold_nothing_up(warm: Machine) -> None:
    loop = "echo $$ > pid; while [ ! -e stop ]; do echo noise || exit 1; sleep 0.05; done; echo ok > ended"
    warm.write_family(
        f"@staticmethod\ndef start(t):\n    import subprocess\n    subprocess.Popen(['sh', '-c', {loop!r}])\n"
    )

    assert warm.run("start").value is None
    wait_until((warm.family / "pid").exists)
    assert is_there(int((warm.family / "pid").read_text()))
    (warm.family / "stop").touch()
    wait_until((warm.family / "ended").exists)


def test_nothing_of_one_operation_is_there_in_the_next(warm: Machine) -> None:
    body = """
        import builtins, os, random, sys
        seen = getattr(builtins, "seen", None), os.environ.get("LEFT"), "email" in sys.modules
        builtins.seen, os.environ["LEFT"] = 1, "1"
        import email
        return [seen, random.random(), os.urandom(4).hex()]
    """
    (first, *drawn), (second, *other) = warm.score(body).value, warm.score(body).value

    assert first == second == [None, None, False]
    assert set(drawn).isdisjoint(other)


def test_modules_of_the_family_are_read_each_time(warm: Machine) -> None:
    def answer() -> object:
        return warm.score("import mine\nreturn mine.VALUE").value

    for value in range(5):
        (warm.family / "mine.py").write_text(f"VALUE = {value}  # {'x' * value}\n")
        assert answer() == value
    (warm.family / "mine.py").unlink()
    (warm.family / "mine").mkdir()
    (warm.family / "mine/__init__.py").write_text("VALUE = 'package'\n")
    assert answer() == "package"
    assert is_warm(warm) is True


def test_operations_at_once(warm: Machine) -> None:
    def run(number: int) -> Answer:
        return warm.run("start", result=str(warm.root / f"results{number}/r.json"))

    warm.write_family("""
        @staticmethod
        def start(t):
            import os, pathlib, time
            pathlib.Path(f"at-{os.getpid()}").touch()
            while len(list(pathlib.Path().glob("at-*"))) < 3:
                time.sleep(0.02)
    """)
    with ThreadPoolExecutor(3) as pool:
        for answer in pool.map(run, range(3)):
            assert answer.stderr == ""
    assert len(list(warm.family.glob("at-*"))) == 3


PREFIX = f"python/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"


def touch_site_packages(machine: Machine) -> None:
    (machine.root / PREFIX / "new.py").touch()


def add_path_file(machine: Machine) -> None:
    (machine.root / PREFIX / "new.pth").write_text("/tmp\n")


def add_start_code(machine: Machine) -> None:
    (machine.root / PREFIX / "sitecustomize.py").write_text("")


def replace_interpreter(machine: Machine) -> None:
    python = machine.root / "python/bin/python3"
    target = python.resolve()
    python.unlink()
    shutil.copy(target, python)


def change_configuration(machine: Machine) -> None:
    with (machine.root / "python/pyvenv.cfg").open("a") as file:
        file.write("\n")


def shadow_in_path(machine: Machine) -> None:
    (machine.root / "other").mkdir()
    (machine.root / "other/python3").symlink_to((machine.root / "python/bin/python3").resolve())
    machine.path = f"{machine.root}/other:{machine.path}"


def kill_server(machine: Machine) -> None:
    os.kill(server(machine), signal.SIGKILL)


def remove_socket(machine: Machine) -> None:
    (machine.warm / "socket").unlink()


def open_directory(machine: Machine) -> None:
    machine.warm.chmod(0o777)


CHANGES = [
    touch_site_packages, add_path_file, add_start_code, replace_interpreter, change_configuration, shadow_in_path,
    kill_server, remove_socket, open_directory,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.replace("_", " "))
def test_whatever_changes_at_an_interpreters_start_means_a_fresh_one(
    warm: Machine, change: Callable[[Machine], None]
) -> None:
    pid = server(warm)
    change(warm)

    assert is_warm(warm) is False
    if change not in (remove_socket, open_directory):
        wait_until(lambda: not is_there(pid))
    else:
        os.kill(pid, signal.SIGKILL)  # it would end by itself within a minute


@pytest.mark.parametrize(
    "environment",
    [
        {"LANG": "C"}, {"PYTHONPATH": "/tmp"}, {"TZ": "Asia/Tokyo"}, {"PYTHONHASHSEED": "1"}, {"LC_ALL": "POSIX"},
        {"LD_LIBRARY_PATH": "/tmp"}, {"MALLOC_ARENA_MAX": "1"}, {"ANY": "thing"}, {"PYTHONUTF8": "1"},
    ],
    ids=lambda environment: next(iter(environment)),
)  # fmt: skip
def test_another_environment_means_a_fresh_interpreter(warm: Machine, environment: dict[str, str]) -> None:
    assert is_warm(warm, environment=environment) is False
    assert is_warm(warm, environment=environment) is True
    assert is_warm(warm) is False


@pytest.mark.parametrize("prefix", [["nice"], ["prlimit", "--nofile=500:600"], ["setpriv", "--no-new-privs"]], ids=str)
def test_other_surroundings_mean_a_fresh_interpreter(warm: Machine, prefix: list[str]) -> None:
    usual, warm.prefix = warm.prefix, prefix
    assert [is_warm(warm), is_warm(warm)] == [False, True]
    warm.prefix = usual
    assert is_warm(warm) is False


def test_a_loaded_module_that_changed_is_loaded_afresh(machine: Machine) -> None:
    with_python(machine)
    library = machine.root / "library"
    library.mkdir()
    environment = {"PYTHONPATH": str(library)}
    source = Path(json.__file__)
    shutil.copytree(source.parent, library / "json", ignore=shutil.ignore_patterns("__pycache__"))
    settle()
    body = f"import json\nreturn [{WARM}, getattr(json, 'CHANGED', None)]"

    answers = [machine.score(body, environment=environment).value for _ in range(2)]
    text = (library / "json/__init__.py").read_text()
    (library / "json/__init__.py").write_text(text + "CHANGED = 'x'\n")
    answers.append(machine.score(body, environment=environment).value)

    assert answers == [[False, None], [True, None], [False, "x"]]


@pytest.mark.parametrize(
    "code",
    ["import time", "print('noise')", "import os; os.open('/', 0)", "import threading; threading.Thread(target=input)"],
    ids=["import", "print", "open file", "thread"],
)
def test_code_at_the_start_means_that_none_is_kept(machine: Machine, code: str) -> None:
    with_python(machine)
    (machine.root / PREFIX / "code.pth").write_text(f"import sys; {code}\n")
    settle()

    assert [is_warm(machine) for _ in range(2)] == [False, False]
    assert not (machine.warm / "socket").exists()


def test_setuptools_own_code_at_the_start_is_known(machine: Machine) -> None:
    with_python(machine)
    (machine.root / PREFIX / "distutils-precedence.pth").write_text("import os; os.environ.get('X')\n")
    settle()

    assert [is_warm(machine) for _ in range(2)] == [False, True]


def test_a_script_in_the_interpreters_place_means_that_none_is_kept(machine: Machine, tmp_path: Path) -> None:
    script = tmp_path / "bin/python3"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    script.chmod(0o755)
    machine.path = f"{script.parent}:{os.defpath}"

    assert [is_warm(machine) for _ in range(2)] == [False, False]


def test_a_server_that_hangs_is_ended_and_does_nothing_later(warm: Machine) -> None:
    pid = server(warm)
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
    old = server(warm)
    remove_socket(warm)
    assert is_warm(warm) is False

    assert server(warm) != old
    with contextlib.suppress(ProcessLookupError):
        os.kill(old, signal.SIGKILL)


@pytest.mark.parametrize("operation", ["install", "setup", "pytest"])
def test_operations_in_builders_leave_nothing_behind(machine: Machine, operation: str) -> None:
    with_python(machine)
    machine.write_family("")

    machine.run(operation, given={}, arguments=[])

    assert not machine.warm.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_reaches_nothing_of_it(warm: Machine) -> None:
    pid = server(warm)
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
