"""Compares forks of the warm interpreter with interpreters that were just started, as the family sees them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.unit.guest.families.probes import PROBES
from tests.unit.guest.machine_directory import Answer, Machine
from tests.unit.guest.warm_machine import is_there, is_warm, wait_until, with_python

FAMILY = Path(__file__).parent / "families/probes.py"
PROBED = {
    "LANG": "C.UTF-8",
    "TZ": "Asia/Tokyo",
    "SOME": "thing",
    "PYTHONHASHSEED": "7",
    "PYTHONWARNINGS": "error::UserWarning",
}


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
    forked_by = machine.server()
    later = [look() for _ in range(2)][1]
    assert machine.server() == forked_by
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
    pid = warm.server()

    assert [is_warm(warm) for _ in range(3)] == [True] * 3
    assert warm.server() == pid
    assert warm.run("intermediate_score").result["status"] == "error"  # the family has none, and says so
    assert warm.server() == pid


def test_the_first_operation_is_forked_from_an_interpreter_that_was_warmed_up(machine: Machine) -> None:
    with_python(machine)
    assert machine.run("warm_up").value is None
    pid = machine.server()

    assert is_warm(machine) is True
    assert machine.server() == pid


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


@pytest.mark.parametrize("operation", ["install", "setup", "pytest"])
def test_operations_in_builders_leave_nothing_behind(machine: Machine, operation: str) -> None:
    with_python(machine)
    machine.write_family("")

    machine.run(operation, given={}, arguments=[])

    assert not machine.warm.exists()
