"""Tests how a compose file's services start, and how their calls end, by what the engine says of them."""

from __future__ import annotations

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
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, Self, cast

import pytest
from inspect_ai.util import OutputLimitExceededError, SandboxUnavailableError

from provisioner.base.errors import CommandTimeoutError, MachineLostError, ProvisionerError, TaskError
from provisioner.base.models import Destination, Role
from provisioner.inspect import sandbox, services
from provisioner.inspect.compose_project import Project
from provisioner.inspect.configuration import Configuration, Machine, configuration_of
from provisioner.inspect.failures import LossError, NotUpError
from provisioner.inspect.sample import SampleMachines
from provisioner.inspect.sandbox import ProvisionerSandbox, ServiceSandbox
from provisioner.inspect.services import Container, on_console, start, wait_until_ready
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
        self.notes: deque[str] = deque()
        self.configuration = SimpleNamespace(on_restart="note")
        self._losses: dict[Role, LossError] = {}

    on = SampleMachines.on

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


def test_services_know_the_names_of_allowed_destinations() -> None:
    run = {"services": {"web": {"extra_hosts": ["db:10.9.8.7"]}, "db": {"network_mode": "service:web"}}}
    allowed = [
        Destination(cidr="192.0.2.1/32", port=443, host_names=("a.example", "b.example")),
        Destination(cidr="10.0.0.0/8", port=22),
    ]
    machine = _engine(DB, WEB)
    start(replace(PROJECT, run=json.dumps(run)), cast(Connection, machine), allowed)
    [written] = machine.files.values()
    given = {name: service.get("extra_hosts") for name, service in json.loads(written)["services"].items()}
    assert given == {"web": ["db:10.9.8.7", "a.example:192.0.2.1", "b.example:192.0.2.1"], "db": None}


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


@pytest.mark.parametrize("said", [Completed(127, b"", b"gone", errno.ESRCH), _says(137)], ids=["said", "died"])
async def test_only_a_container_that_is_gone_is_unavailable(said: Completed) -> None:
    def answer(**state: Any) -> _Machine:
        return _Machine(lambda argv: _says(0, _state(**state)) if argv[0] == "engine" else said)

    gone = {"status": "exited", "exit_code": 137, "pid": 0}
    with pytest.raises(SandboxUnavailableError, match="The container of the service web does not run: exited, exit"):
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
        services, "start", lambda *_, **__: [Container("db", ID, "", "/", PID), Container("web", ID, "", "/", PID)]
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
    def refuse(*_: object, **__: object) -> list[Container]:
        raise services.ServicesError("The service web is not up.", details="its last words")

    monkeypatch.setattr(services, "start", refuse)
    with pytest.raises(TaskError, match="not up") as raised:
        await ProvisionerSandbox.sample_init("task", compose, {})
    assert "its last words" in str(raised.value)
    assert "The cloud says" not in str(raised.value)  # as of a machine that is lost
    assert cloud.existing() == []


HEX = "ab" * 32
MACHINE = (
    "6,{number},1234,-;oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,"
    "task_memcg=/system.slice/docker-" + HEX + ".scope,task=java,pid=812,uid=0"
)
LIMIT = (
    "6,7,1234,-;oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=x,mems_allowed=0,"
    "oom_memcg=/system.slice/docker-" + HEX + ".scope,task_memcg=/system.slice/docker-" + HEX + ".scope/call-1-2,"
    "task=a,b\x1b[0m,pid=5,uid=1000"
)
CALM = "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
FULL = CALM.replace("full avg10=0.00 avg60=0.00", "full avg10=80.00 avg60=61.50")


def test_a_console_says_what_the_kernel_ended_last() -> None:
    lines = [f"[   {number}.0] Out of memory: Killed process {number} (ja\x1bva) total-vm:9kB" for number in (7, 812)]
    told = on_console("\n".join(["[    1.0] booted", *lines, "[  820.0] login:"]))
    assert "Its console says: [   812.0] Out of memory: Killed process 812 (ja" in told
    assert "memory_gb" in told
    assert told.isprintable()
    assert on_console("[    1.0] booted") == ""


@dataclass
class Machines:
    """Answers as a machine whose services have said something.

    Args:
        is_ready: whether `ready` succeeds in time.
    """

    is_ready: bool = True
    journal: bytes = b"web: ModuleNotFoundError: flask\n"
    asked: list[list[str]] = field(default_factory=list)

    def run(self, argv: list[str], **_: Any) -> Completed:
        """Runs a program."""
        self.asked.append(argv)
        if argv[0] == "bash" and not self.is_ready:
            raise CommandTimeoutError("late")
        return Completed(0, self.journal if argv[0] == "journalctl" else b"", b"")


BOX = Machine(name="box", services=(("web", "python3 app.py"), ("db", "sleep 9d")), ready=80)


@pytest.mark.parametrize(("ready", "text"), [(8000, "exec 3<>/dev/tcp/127.0.0.1/8000"), ("test -e /x", "test -e /x")])
def test_the_sample_waits_for_what_the_configuration_says(ready: int | str, text: str) -> None:
    machines = Machines()
    wait_until_ready(BOX.model_copy(update={"ready": ready}), cast(Calls, machines))
    assert [argv[-1] for argv in machines.asked] == [text]


def test_a_machine_that_does_not_become_ready_is_an_error_with_its_services_last_words() -> None:
    machines = Machines(is_ready=False)
    with pytest.raises(NotUpError, match="box is not ready: nothing listens at port 80 after 300 s") as caught:
        wait_until_ready(BOX, cast(Calls, machines))
    assert caught.value.details == "web: ModuleNotFoundError: flask"
    assert machines.asked[-1][-2:] == ["--unit=web.service", "--unit=db.service"]


def test_what_a_machine_says_is_bounded_and_printable() -> None:
    machines = Machines(is_ready=False, journal=b"\x1b]0;title\x07 words\n" * 4000)
    with pytest.raises(NotUpError) as caught:
        wait_until_ready(BOX, cast(Calls, machines))
    assert len(str(caught.value.details)) < 2200
    assert "\x1b" not in str(caught.value.details)


def test_the_port_is_a_number_of_a_port() -> None:
    assert Machine(ready=80).ready == 80
    for wrong in (0, 70000, True, 1.5):
        with pytest.raises(ValueError, match="ready"):
            Machine.model_validate({"ready": wrong})
