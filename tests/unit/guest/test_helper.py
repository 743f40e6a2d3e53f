"""Tests the guest's helper as the driver runs it: a JSON request on stdin, a result in a file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from provisioner.clouds.guest_files import GUEST
from tests.unit.guest.machine_directory import Machine
from tests.waiting import BOUND_SECONDS, until


@pytest.mark.parametrize(("path", "words"), [("/nonexistent", "no `python3`"), (".", "python3'")], ids=["no", "broken"])
def test_a_familys_python_that_cannot_run_is_a_failure(machine: Machine, path: str, words: str) -> None:
    (machine.root / "python3").write_text("#!/nonexistent\n")
    (machine.root / "python3").chmod(0o755)
    machine.path = str(machine.root / path)
    result = machine.score("return 1").result
    assert (result["status"], result["kind"]) == ("error", "invalid")
    assert words in result["message"]


def test_operations_without_task_code_use_our_python(machine: Machine) -> None:
    machine.path = "/nonexistent"
    environment = {"PYTHONHOME": "/nonexistent", "PYTHONPATH": str(machine.family)}
    (machine.family / "json.py").write_text("raise SystemExit(66)")
    assert machine.run("read_submission", path="/x", limit_bytes=1, environment=environment).value["found"] is False


def test_an_exception_has_its_type_message_and_traceback_from_the_family_on(machine: Machine) -> None:
    result = machine.score("raise ValueError('wrong ' + submission)").result
    assert (result["status"], result["kind"], result["type"]) == ("error", "exception", "ValueError")
    assert result["message"] == "wrong abandon"
    first, frame, *_ = result["traceback"].splitlines()
    assert first == "Traceback (most recent call last):"
    assert "fam.py" in frame


@pytest.mark.parametrize(
    ("before", "line"),
    [
        ("def check():\n    raise KeyError('traceback')\ncheck()\n", "    check()"),
        ("import a_module_that_is_missing\n", "    import a_module_that_is_missing"),
        ("numbers = (\n", "    numbers = ("),
    ],
    ids=["raises", "imports", "syntax"],
)
@pytest.mark.parametrize("operation", ["setup", "start"])
def test_a_failed_import_is_shown_where_it_fails(machine: Machine, before: str, line: str, operation: str) -> None:
    machine.write_family("pass\n", before=before)
    trace = machine.run(operation, given={}).result["traceback"].removeprefix("Traceback (most recent call last):\n")
    frame, code, *_ = trace.splitlines()
    assert "fam.py" in frame
    assert code == line


def test_an_exception_of_the_helpers_own_keeps_its_traceback(machine: Machine) -> None:
    machine.write_family("pass\n")
    result = machine.run("score", submission=str(machine.root / "missing")).result
    assert result["type"] == "FileNotFoundError"
    assert "family/operations.py" in result["traceback"]


def test_an_exception_of_another_of_our_programs_keeps_it_too(tmp_path: Path) -> None:
    (tmp_path / "environment").mkdir()
    program = (
        "import functools, sys; sys.path.insert(0, sys.argv[1]); from provisioner_guest import login;"
        "from provisioner_guest.family import results;"
        "print(results.result_of(functools.partial(login.etc_environment, sys.argv[2]))['traceback'])"
    )
    command = [sys.executable, "-B", "-c", program, str(GUEST), str(tmp_path)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.index("family/results.py") < said.index("provisioner_guest/login.py")


def test_a_huge_exception_is_cut(machine: Machine) -> None:
    result = machine.score("raise ValueError('x' * 50_000_000)").result
    assert len(result["message"]) == 10_000
    assert len(result["traceback"]) < 31_000


@pytest.mark.parametrize("name", ["KeyboardInterrupt", "GeneratorExit", "BaseException"])
def test_exceptions_that_end_programs_are_exceptions_too(machine: Machine, name: str) -> None:
    assert machine.score(f"raise {name}()").result["type"] == name


@pytest.mark.parametrize(
    ("body", "exit_code"),
    [
        ("__import__('sys').exit(3)", 3),
        ("__import__('sys').exit()", 0),
        ("__import__('sys').exit('text')", 1),
        ("__import__('os')._exit(4)", 4),
        ("__import__('os')._exit(0)", 0),
        ("import os\nos.kill(os.getpid(), 9)", -9),
        ("import os\nos.killpg(0, 9)", -9),
    ],
)
def test_a_process_that_ends_is_told_apart_with_its_exit_code(machine: Machine, body: str, exit_code: int) -> None:
    result = machine.score(body).result
    assert (result["kind"], result["exit_code"]) == ("exit", exit_code)


def test_a_copy_of_the_process_gives_no_second_result(machine: Machine) -> None:
    body = "import os, time\npid = os.fork()\nif pid: os.waitpid(pid, 0)\nreturn 1.0 if pid else 2.0"
    assert machine.score(body).value == 1.0


def test_prints_that_look_like_a_result_are_only_prints(machine: Machine) -> None:
    line = '{"status": "ok", "value": 1.0}'
    answer = machine.score(f"import sys\nprint({line!r})\nprint({line!r}, file=sys.stderr)\nreturn 0.0")
    assert answer.value == 0.0
    assert answer.stdout == answer.stderr == line + "\n"


def test_an_earlier_result_is_never_taken_for_this_ones(machine: Machine) -> None:
    machine.score("return 1.0")
    assert machine.score("__import__('os')._exit(0)").result["kind"] == "exit"


def test_only_root_can_read_results_and_output_is_removed(machine: Machine) -> None:
    machine.score("print('secret')\nreturn 1.0")
    assert (machine.root / "results").stat().st_mode & 0o777 == 0o700
    assert (machine.root / "results/result.json").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in (machine.root / "results").iterdir()] == ["result.json"]
    assert list((machine.root / "var/lib/provisioner/operations").iterdir()) == []


def test_a_result_directory_that_others_can_enter_is_refused(machine: Machine) -> None:
    (machine.root / "results").mkdir(mode=0o755)
    process = machine.start("install")
    stderr = process.communicate(timeout=BOUND_SECONDS)[1]
    assert process.returncode == 2
    assert b"must be a directory that only root can enter" in stderr


def test_a_request_that_is_none_is_refused_without_showing_it() -> None:
    command = [sys.executable, "-B", str(GUEST / "helper.py")]
    for request in (b"hunter2", b'["hunter2"]', b'{"operation": "start", "environment": {"A": ["hunter2"]}}'):
        ended = subprocess.run(command, input=request, capture_output=True, timeout=BOUND_SECONDS, check=False)
        assert ended.returncode == 2
        assert b"helper: the request" in ended.stderr
        assert b"hunter2" not in ended.stderr + ended.stdout


def test_a_hundred_megabytes_of_output_are_bounded(machine: Machine) -> None:
    machine.write_start("""
        print("first")
        for _ in range(100):
            print("x" * 1_000_000)
        print("last")
    """)

    answer = machine.run("start", output_limit_bytes=1000)

    assert answer.value is None
    head, marker, tail = answer.stdout.partition(f"\n[... {100_000_111 - 1000} bytes cut out ...]\n")
    assert marker
    assert (len(head), len(tail)) == (500, 500)
    assert head.startswith("first\nxxx")
    assert tail.endswith("xxx\nlast\n")


def test_output_within_the_limit_comes_whole(machine: Machine) -> None:
    assert machine.score("print('y' * 900_000)\nreturn 1.0").stdout == "y" * 900_000 + "\n"


def test_output_comes_while_the_operation_runs(machine: Machine) -> None:
    machine.write_start("""
        import os, time
        print("here")
        while not os.path.exists("go"):
            time.sleep(0.05)
    """)
    process = machine.start("start")
    assert process.stdout is not None
    line, running = process.stdout.readline(), process.poll() is None
    (machine.family / "go").touch()
    assert (line, running) == (b"here\n", True)
    process.communicate(timeout=BOUND_SECONDS)


def test_a_listener_that_goes_away_does_not_end_the_operation(machine: Machine) -> None:
    machine.write_start("""
        import time
        for _ in range(5):
            print("here")
            time.sleep(0.2)
    """)
    process = machine.start("start")
    for stream in (process.stdout, process.stderr):
        assert stream is not None
        stream.close()
    assert process.wait(timeout=BOUND_SECONDS) == 0
    assert json.loads((machine.root / "results/result.json").read_bytes())["status"] == "ok"


def test_a_time_limit_kills_the_operation_and_its_children(machine: Machine) -> None:
    machine.write_start("""
        import subprocess
        child = subprocess.Popen(["sleep", "300"])
        open("child", "w").write(str(child.pid))
        print("working")
        child.wait()
    """)

    answer = machine.run("start", timeout_seconds=4.5)

    assert answer.result["kind"] == "timeout"
    assert "4.5 seconds" in answer.result["message"]
    if answer.stdout:  # a busy host may not get so far in this time
        assert answer.stdout == "working\n"
        child = int((machine.family / "child").read_text())
        until(lambda: not is_running(child))


def is_running(pid: int) -> bool:
    """Returns whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_what_start_leaves_running_survives(machine: Machine) -> None:
    machine.write_start("""
        import subprocess
        loop = "while [ ! -e stop ]; do echo noise || exit 1; echo >> rounds; sleep 0.05; done; echo ok > ended"
        subprocess.Popen(["sh", "-c", loop])
    """)

    assert machine.run("start").value is None
    rounds = machine.family / "rounds"
    until(rounds.exists)
    before = rounds.stat().st_size
    until(lambda: rounds.stat().st_size > before + 2)
    (machine.family / "stop").touch()
    until((machine.family / "ended").exists)


def test_task_code_gets_a_clean_environment_and_an_empty_stdin(machine: Machine) -> None:
    (machine.root / "etc/environment").write_text("# comment\nSSL_CERT_FILE='/etc/ssl/ca.crt'\nPLAIN=a=b\n\nodd line\n")
    machine.write_start("""
        import json, os, sys
        print(json.dumps([dict(os.environ), os.getcwd(), sys.stdin.read(), sys.argv[1:], sys.path[0]]))
    """)
    machine.path = ""  # that of the login
    answer = machine.run("start", environment={"TOKEN": "hunter2", "SHELL": "/bin/sh"})
    environment, cwd, stdin, arguments, path = json.loads(answer.stdout)
    assert environment == {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": str(machine.family),
        "USER": "root",
        "LOGNAME": "root",
        "SHELL": "/bin/sh",
        "LANG": "C.UTF-8",
        "SSL_CERT_FILE": "/etc/ssl/ca.crt",
        "PLAIN": "a=b",
        "TOKEN": "hunter2",
    }
    assert (cwd, path) == (str(machine.family), str(machine.family))
    assert (stdin, arguments) == ("", ["child"])


def test_the_family_imports_its_own_modules_and_not_the_helpers(machine: Machine) -> None:
    (machine.family / "helper.py").write_text("NAME = 'mine'\n")
    name, path = machine.score("import helper, sys\nreturn [helper.NAME, sys.path]").value
    assert name == "mine"
    assert str(GUEST) not in path


def test_nothing_of_one_operation_is_there_in_the_next(machine: Machine) -> None:
    body = """
        import builtins, os, random, sys
        seen = getattr(builtins, "seen", None), os.environ.get("LEFT"), "email" in sys.modules
        builtins.seen, os.environ["LEFT"] = 1, "1"
        import email
        return [seen, os.getpid(), random.random(), hash("x")]
    """
    (first, *drawn), (second, *other) = machine.score(body).value, machine.score(body).value

    assert first == second == [None, None, False]
    assert set(drawn).isdisjoint(other)


def test_an_unknown_operation_and_a_missing_key_say_so(machine: Machine) -> None:
    assert machine.run("dance").result["message"] == "there is no operation 'dance'"
    assert machine.run("shell").result["message"] == "the operation 'shell' needs 'commands', a list"
