"""Tests how a compose file's services start, and how their calls end, by what the engine says of them."""

from __future__ import annotations

import contextlib
import errno
import json
import re
import shlex
import socketserver
import subprocess
import sys
import threading
import urllib.parse
from collections import deque
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, Self, cast

import pytest
from inspect_ai.util import OutputLimitExceededError, SandboxUnavailableError

from provisioner.errors import CommandTimeoutError, MachineLostError, ProvisionerError, TaskError
from provisioner.inspect import sandbox, services
from provisioner.inspect.compose_project import Project
from provisioner.inspect.configuration import Configuration, configuration_of
from provisioner.inspect.losses import LossError
from provisioner.inspect.memory import Watch
from provisioner.inspect.sample import SampleMachines
from provisioner.inspect.sandbox import ProvisionerSandbox
from provisioner.inspect.services import Container, ServiceSandbox, start
from provisioner.models import Role
from provisioner.ssh.calls import Calls
from provisioner.ssh.connection import Connection
from provisioner.ssh.exchange import Completed, StreamSize
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.inspect.conftest import Configured

ID, PID = "0123456789abcdef", 321
PROJECT = Project(("web", "db"), "{}", '{"services": {}}', (), frozenset(), (), 0, "", 1, 2, ())


class _Machine:
    """Answers each command as the test says, and keeps what it was given."""

    def __init__(self, answer: Callable[[list[str]], Completed] = lambda _: Completed(0, b"", b"")) -> None:
        self._answer = answer
        self.calls: list[list[str]] = []
        self.inputs: list[bytes] = []
        self.options: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.environment = SimpleNamespace(id="eval-1")
        self.memory = Watch()
        self.notes: deque[str] = deque()
        self.configuration = SimpleNamespace(on_restart="note")
        self._losses: dict[Role, LossError] = {}

    on = SampleMachines.on

    def look_for_shortage(self, role: Role, _: object) -> None:
        with contextlib.suppress(ValueError):
            self.notes += self.memory.look(role, cast(Calls, self), 2)

    def _connection(self, _: Role) -> Self:
        return self

    def _loss(self, error: ProvisionerError, *_: object) -> NoReturn:
        raise error

    def run(self, argv: list[str], *, stdin: bytes = b"", **options: Any) -> Completed:
        self.calls.append(list(argv))
        self.inputs.append(stdin)
        self.options.append(options)
        done = self._answer(list(argv))
        for listen, data in ((options.get("on_stdout"), done.stdout), (options.get("on_stderr"), done.stderr)):
            if listen:
                listen(data)
        return done

    def write_file(self, path: str, data: bytes, **_: Any) -> None:
        self.files[path] = data


def _says(exit_code: int = 0, stdout: str = "", stderr: str = "") -> Completed:
    sizes = (StreamSize(len(text.encode())) for text in (stdout, stderr))
    return Completed(exit_code, stdout.encode(), stderr.encode(), None, *sizes)


def _state(service: object = "web", **more: Any) -> str:
    """What the engine says of a container."""
    state = {
        "id": ID, "service": service, "user": "", "directory": "", "pid": PID, "status": "running", "exit_code": 0,
        "health": "", "restarts": 0, "ports": {},
    }  # fmt: skip
    return json.dumps({**state, **more})


def _engine(*states: str) -> _Machine:
    """A machine whose engine says these states of containers."""

    def answer(argv: list[str]) -> Completed:
        if argv[0] == "engine":
            return _says(0, "\n".join(states))
        return _says(1 if "up" in argv else 0, "", "what is said" if {"up", "logs"} & set(argv) else "")

    return _Machine(answer)


pytestmark = pytest.mark.anyio

WEB, DB = _state("web"), _state("db")


def test_services_have_their_containers_users_and_directories() -> None:
    machine = _engine(DB, _state("web", health="healthy", user="app:1", directory="/srv"))
    web, db = start(PROJECT, cast(Connection, machine))
    assert (web.service, db.service) == ("web", "db")
    assert (web.user, web.directory, web.identity, web.pid) == ("app:1", "/srv", ID, PID)
    assert machine.files == {"/opt/sandbox/compose.json": PROJECT.run.encode()}
    [up] = [call for call in machine.calls if "up" in call]
    assert {"--no-build", "--wait"} < set(up)


def test_a_service_that_is_done_is_no_sandbox() -> None:
    machine = _engine(WEB, _state("db", status="exited", pid=0))
    assert [container.service for container in start(PROJECT, cast(Connection, machine))] == ["web"]


def test_no_other_service_stands_in_for_the_default_one() -> None:
    machine = _engine(_state("web", status="exited", pid=0), DB)
    with pytest.raises(TaskError, match="The default service web has ended already: exited, exit code 0"):
        start(PROJECT, cast(Connection, machine))


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"status": "exited", "exit_code": 3}, "The service db is not up: exited, exit code 3."),
        ({"health": "unhealthy"}, "The service db is not up: running, unhealthy"),
        (None, "The service db is not up: it has no container."),
    ],
    ids=["failed", "unhealthy", "missing"],
)
def test_a_service_that_is_not_up_is_named_with_its_last_words(state: Mapping[str, Any] | None, said: str) -> None:
    machine = _engine(WEB, *([_state("db", **state)] if state else []))
    with pytest.raises(TaskError, match=re.escape(said)) as raised:
        start(PROJECT, cast(Connection, machine))
    assert "what is said" in str(raised.value.details)


@pytest.mark.parametrize(
    "line",
    [
        _state(user="a\0b"),
        _state(directory="srv"),
        '{"user": "%s"}' % ("x" * 300),
        "{",
        "[]",
        _state(id="$(reboot)"),
        _state(service=["web"]),
        _state(pid=-1),
        _state(pid="1"),
        _state(restarts=None),
    ],
    ids=["null", "relative", "keys", "half", "list", "no id", "names", "negative", "text", "none"],
)
def test_false_words_about_a_container_are_refused(line: str) -> None:
    machine = _engine(WEB, DB, line)
    with pytest.raises(TaskError, match=r"does not describe a container|no JSON"):
        start(PROJECT, cast(Connection, machine))


class _Api(BaseHTTPRequestHandler):
    """Answers as the engine's socket does."""

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        answer: object = {"message": "No such container"}
        if url.path == "/containers/json":
            [filters] = urllib.parse.parse_qs(url.query)["filters"]
            assert "com.docker.compose.project=sandbox" in json.loads(filters)["label"]
            answer = [{"Id": "e" * 64}, {"Id": ID}]  # the first has gone since
        if self.path == f"/containers/{ID}/json":
            answer = {
                "Id": ID,
                "Config": {"User": "app", "WorkingDir": "/srv", "Labels": {"com.docker.compose.service": "db"}},
                "State": {"Pid": PID, "Status": "running", "ExitCode": 0, "Health": {"Status": "healthy"}},
                "NetworkSettings": {"Ports": {"80/tcp": None}},
                "RestartCount": 2,
            }
        self.send_response(404 if "message" in str(answer) else 200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())


@pytest.mark.parametrize("identities", [(), (ID,), ("f" * 64,)], ids=["all", "one", "gone"])
def test_the_program_in_the_machine_asks_the_engines_socket(tmp_path: Path, identities: tuple[str, ...]) -> None:
    with socketserver.ThreadingUnixStreamServer(str(tmp_path / "socket"), _Api) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        program = services._PROGRAM.replace("/run/docker.sock", str(tmp_path / "socket"))
        done = subprocess.run(
            [sys.executable, "-c", program, "sandbox", *identities], capture_output=True, text=True, check=False
        )
        server.shutdown()
    if identities == ("f" * 64,):
        assert (done.returncode, done.stdout) == (1, "")
        assert "No such container" in done.stderr
        return
    expected = {"user": "app", "directory": "/srv", "health": "healthy", "restarts": 2, "ports": {"80/tcp": None}}
    assert json.loads(done.stdout) == json.loads(_state("db", **expected))


def _sandbox(machine: _Machine, user: str = "") -> ServiceSandbox:
    return ServiceSandbox(cast(SampleMachines, machine), Container("web", ID, user, "/srv", PID))


async def test_a_command_runs_in_the_container_as_the_call_says() -> None:
    machine = _Machine(lambda _: _says(0, "out", "err"))
    given = {"KEY": "s3cret 'value'\n$HOME"}
    done = await _sandbox(machine).exec(["ls", "-l"], input="in", cwd="sub", user="app", timeout=9, env=given)
    assert (done.stdout, done.stderr) == ("out", "err")
    assert machine.calls == [["ls", "-l"]]
    assert machine.inputs == [b"in"]
    [options] = machine.options
    assert options["container"] == (ID, PID)
    assert (options["user"], options["cwd"], options["timeout_seconds"]) == ("app", "/srv/sub", 9)
    assert options["environment"] == given
    await _sandbox(machine).exec(["pwd"])
    assert (machine.options[1]["user"], machine.options[1]["cwd"]) == ("", "/srv")


async def test_null_characters_in_paths_reach_no_machine() -> None:
    machine = _Machine()
    sandbox = _sandbox(machine)
    for call in (sandbox.read_file("a\0"), sandbox.write_file("a\0", ""), sandbox.exec(["a"], cwd="\0")):
        with pytest.raises(ValueError, match="embedded null byte"):
            await call
    assert machine.calls == []


async def test_a_command_that_times_out_is_an_error_with_its_output_and_the_callers_limit() -> None:
    def answer(_: list[str]) -> Completed:
        raise CommandTimeoutError("x did not end within 1 s.")

    with pytest.raises(TimeoutError, match="after 1 seconds"):
        await _sandbox(_Machine(answer)).exec(["x"], timeout=1)


@pytest.mark.parametrize("code", [124, 143])
async def test_a_commands_own_exit_code_is_no_time_out(code: int) -> None:
    done = await _sandbox(_Machine(lambda _: _says(code, "x"))).exec(["x"], timeout=1)
    assert done.returncode == code


async def test_a_program_that_may_not_be_executed_is_an_error() -> None:
    said = Completed(126, b"", b'exec: "x": permission denied\n', errno.EACCES)
    with pytest.raises(PermissionError):
        await _sandbox(_Machine(lambda _: said)).exec(["x"], timeout=5)


async def test_a_command_that_could_not_be_started_is_a_result() -> None:
    said = Completed(127, b"", b'exec: "x": executable file not found in $PATH\n', errno.ENOENT)
    done = await _sandbox(_Machine(lambda _: said)).exec(["x"])
    assert (done.returncode, done.stdout) == (127, "")
    assert "x" in done.stderr


@pytest.mark.parametrize("said", [Completed(127, b"", b"gone", errno.ESRCH), _says(137)], ids=["said", "died"])
async def test_only_a_container_that_is_gone_is_unavailable(said: Completed) -> None:
    def answer(**state: Any) -> _Machine:
        return _Machine(lambda argv: _says(0, _state(**state)) if argv[0] == "engine" else said)

    gone = {"status": "exited", "exit_code": 137, "pid": 0}
    with pytest.raises(SandboxUnavailableError, match="The container of the service web does not run: 'exited, exit"):
        await _sandbox(answer(**gone)).exec(["x"])
    with pytest.raises(SandboxUnavailableError, match="does not run"):
        await _sandbox(answer(**gone)).read_file("x")
    assert not (await _sandbox(answer()).exec(["x"])).success


def _restarted() -> _Machine:
    """A machine whose engine has started the container again: its first process is another one."""
    made = _Machine()

    def answer(argv: list[str]) -> Completed:
        if argv[0] == "engine":
            return _says(0, _state(pid=PID + 1, restarts=2))
        if argv == ["memory"]:
            return _says(0, "[]")
        is_known = made.options[-1]["container"] == (ID, PID + 1)
        return _says(0, "out") if is_known else Completed(127, b"", b"", errno.ESTALE)

    made._answer = answer
    return made


def _notes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    notes: list[Any] = []
    told = SimpleNamespace(info=lambda facts, source: notes.append(facts))
    monkeypatch.setattr(sandbox, "transcript", lambda: told)
    return notes


async def test_a_container_that_was_started_again_is_noted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    notes, machine = _notes(monkeypatch), _restarted()
    sandbox = _sandbox(machine)
    assert (await sandbox.exec(["x"])).stdout == "out"
    assert await sandbox.read_file("x") == "out"
    [note] = notes
    assert note["note"] == (
        "The engine has started the container of the service web again (restarts so far: 2): what ran in it has ended."
    )


async def test_a_container_that_was_started_again_may_count_as_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    notes, machine = _notes(monkeypatch), _restarted()
    machine.configuration.on_restart = "fail"
    with pytest.raises(MachineLostError, match="has started the container of the service web again"):
        await _sandbox(machine).exec(["x"])
    assert notes == []


@pytest.mark.parametrize(
    ("said", "ports"),
    [
        (
            {"5900/tcp": [{"HostIp": "127.0.0.1", "HostPort": "32768"}], "80/tcp": None},
            [(5900, "tcp", "127.0.0.1", 32768)],
        ),
        ({"5900/tcp": [{"HostIp": "$(reboot)", "HostPort": "1"}], "x": 1, "53/udp": [{"HostPort": "9" * 99}]}, None),
        ("no ports", None),
    ],
    ids=["published", "false", "text"],
)
async def test_published_ports_are_a_connections(said: object, ports: list[Any] | None) -> None:
    machine = _engine(_state("web", ports=said), DB)
    web, _ = start(PROJECT, cast(Connection, machine))
    connection = await ServiceSandbox(cast(SampleMachines, machine), web).connection()
    found = [
        (port.container_port, port.protocol, place.host_ip, place.host_port)
        for port in connection.ports or ()
        for place in port.mappings
    ]
    assert found == (ports or [])


@pytest.mark.parametrize("is_late", [False, True], ids=["killed", "late"])
async def test_a_command_that_ends_out_of_memory_is_noted(monkeypatch: pytest.MonkeyPatch, is_late: bool) -> None:
    notes = _notes(monkeypatch)
    kill = f"6,3,1,-;oom-kill:constraint=CONSTRAINT_NONE,task_memcg=/docker-{'ab' * 32}.scope,task=java,pid=8,uid=0"

    def answer(argv: list[str]) -> Completed:
        if argv == ["memory"]:
            return _says(0, json.dumps([[kill], "", {}]))
        if is_late:
            raise CommandTimeoutError("x did not end within 1 s.")
        return _says(137, "Killed")

    late = pytest.raises(
        TimeoutError, match=r"after 1 seconds\. x did not end within 1 s\. The kernel ended java \(process 8\)"
    )
    with late if is_late else contextlib.nullcontext():
        await _sandbox(_Machine(answer)).exec(["x"], timeout=1)
    [note] = notes
    assert (
        "ended java (process 8) in a service, out of memory: the machine's 2 GiB are full; raise `memory_gb`"
        in note["note"]
    )


async def test_a_container_that_ended_out_of_memory_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    _notes(monkeypatch)
    kill = f"6,3,1,-;oom-kill:constraint=CONSTRAINT_NONE,task_memcg=/docker-{'ab' * 32}.scope,task=java,pid=8,uid=0"

    def answer(argv: list[str]) -> Completed:
        if argv == ["memory"]:
            return _says(0, json.dumps([[kill], "", {}]))
        gone = _state(status="exited", exit_code=137, pid=0)
        return _says(0, gone) if argv[0] == "engine" else Completed(127, b"", b"gone", errno.ESRCH)

    sandbox = _sandbox(_Machine(answer))
    sandbox.machines.memory.services = {"ab" * 32: "web"}
    for _ in range(2):
        with pytest.raises(SandboxUnavailableError, match=r"web does not run: .*; raise `memory_gb`") as raised:
            await sandbox.exec(["x"])
        assert str(raised.value).count("ended java (process 8) in the service web, out of memory") == 1
        # Much later, it is still why.
        monkeypatch.setattr("provisioner.inspect.sample.BEFORE_LOSS_SECONDS", -600.0)


async def test_an_engine_that_says_nothing_makes_a_service_unavailable() -> None:
    machine = _Machine(lambda argv: _says(1, "", "no engine") if argv[0] == "engine" else _says(137))
    with pytest.raises(SandboxUnavailableError, match="no engine"):
        await _sandbox(machine).exec(["x"])


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("cat: x: No such file or directory", FileNotFoundError),
        ("Permission denied", PermissionError),
        ("tee: x: Is a directory", IsADirectoryError),
        ("File too large", OutputLimitExceededError),
        ("mkdir: cannot create directory 'x': Not a directory", PermissionError),
        ("Not a regular file", PermissionError),
        ("something else", OSError),
    ],
)
async def test_file_errors_are_those_that_inspect_expects(words: str, kind: type[Exception]) -> None:
    sandbox = _sandbox(_Machine(lambda _: _says(1, "", f"{words}\n")))
    with pytest.raises(kind):
        await sandbox.read_file("x")
    with pytest.raises(kind):
        await sandbox.write_file("x", "text")


async def test_files_are_the_containers_and_relative_to_its_directory() -> None:
    machine = _Machine(lambda _: _says(0, "text"))
    assert await _sandbox(machine, "app").read_file("a b") == "text"
    await _sandbox(machine, "app").write_file("/x/y", b"data")
    read, write = machine.calls
    assert read[-3:] == ["/srv/a b", "*", str(100 << 20)]
    assert write[-3:] == ["/x/y", "*", "/x"]
    assert machine.inputs == [b"", b"data"]
    await _sandbox(machine, "0:0").read_file("a")
    assert machine.calls[2][-2] == "?r*"


async def test_a_person_gets_a_shell_in_the_container() -> None:
    connection = await _sandbox(_Machine()).connection(user="app")
    shell = f"docker exec --interactive --tty --user app {ID} /bin/sh"
    assert shlex.split(connection.command)[-1] == shell
    assert connection.command.startswith("provisioner ssh eval-1 --user root -- -t ")
    assert connection.container == ID


@pytest.fixture
def compose(configured: Configured, tmp_path: Path) -> Configuration:
    """The configuration of a compose file, on the fake cloud."""
    (tmp_path / "compose.yaml").write_text("services: {db: {image: x, network_mode: none}, web: {image: y}}")
    return configuration_of(str(tmp_path / "compose.yaml"))


async def test_a_samples_services_are_its_sandboxes(
    cloud: FakeCloud, compose: Configuration, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        services, "start", lambda *_: [Container("db", ID, "", "/", PID), Container("web", ID, "", "/", PID)]
    )
    await ProvisionerSandbox.task_init("startup", compose)
    assert "No internet for web, which have it in Docker" in caplog.text
    sandboxes = await ProvisionerSandbox.sample_init("task", compose, {})
    assert list(sandboxes) == ["db", "web"]
    assert len(cloud.existing()) == 1
    await ProvisionerSandbox.sample_cleanup("task", compose, sandboxes, interrupted=False)
    assert cloud.existing() == []


async def test_a_sample_whose_service_fails_says_why(
    cloud: FakeCloud, compose: Configuration, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> list[Container]:
        raise services.ServicesError("The service web is not up.", details="its last words")

    monkeypatch.setattr(services, "start", refuse)
    with pytest.raises(TaskError, match="not up") as raised:
        await ProvisionerSandbox.sample_init("task", compose, {})
    assert "its last words" in str(raised.value)
    assert "The cloud says" not in str(raised.value)  # as of a machine that is lost
    assert cloud.existing() == []
