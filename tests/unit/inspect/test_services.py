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
import time
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
from provisioner.inspect.services import MEMORY_PROGRAM, Container, Watch, on_console, start, wait_until_ready
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


def _watch() -> Watch:
    watch = Watch()
    watch.services = {HEX: "web"}
    return watch


def _told(said: Any, watch: Watch | None = None, role: Role = "primary") -> list[str]:
    stdout = json.dumps(said).encode()
    connection = SimpleNamespace(run=lambda *_, **__: Completed(0, stdout, b""))
    return (watch or _watch()).look(role, cast(Calls, connection), 2)


@pytest.mark.parametrize(
    ("kills", "pressure", "says"),
    [
        (
            [MACHINE.format(number=3)],
            CALM,
            "The kernel ended java (process 812) in the service web, out of memory: the machine's 2 GiB are full; "
            "raise `memory_gb` of its machine (in a compose file: `x-provisioner`, `machines`).",
        ),
        ([LIMIT], CALM, "(process 5) in the service web, out of memory: it has reached the container's own limit; "),
        (
            [LIMIT.replace(f"oom_memcg=/system.slice/docker-{HEX}.scope", "oom_memcg=/containers.slice")],
            CALM,
            "in the service web, out of memory: the machine's 2 GiB are full; raise `memory_gb`",
        ),
        ([], FULL, "The machine's 2 GiB of memory are full: for 62 % of the last minute"),
    ],
    ids=["machine", "container", "all containers", "pressure"],
)
def test_what_is_short_is_told_with_the_setting_to_raise(kills: list[str], pressure: str, says: str) -> None:
    watch = _watch()
    [told] = _told([kills, pressure, {HEX: 3, "cd" * 32: 5}], watch)
    assert says in told
    assert told.isprintable()
    assert watch.restarts == {"web": 3}


def test_each_end_is_told_once() -> None:
    watch = _watch()
    assert len(_told([[MACHINE.format(number=3)], CALM, {}], watch)) == 1
    assert len(_told([[MACHINE.format(number=number) for number in (3, 4)], CALM, {}], watch)) == 1


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


@pytest.mark.parametrize(
    "said",
    [
        [],
        {},
        [[1, "x"], CALM, {}],
        [["no kill"], "x", {HEX: "1"}],
        "x",
        [[], CALM, {HEX: -1}],
        [[], CALM, {HEX: 10**9}],
    ],
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
    done = subprocess.run([sys.executable, "-I", "-c", MEMORY_PROGRAM], capture_output=True, check=False)
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
    files = {"cut": '{"RestartCount": ', "new": "{}", HEX: '{"RestartCount": 2}'}
    for name in ("gone", *files):
        config = tmp_path / "containers" / name / "config.v2.json"
        config.parent.mkdir(parents=True)
        config.write_text(files[name]) if name in files else config.symlink_to("removed")
    program = MEMORY_PROGRAM
    for path, instead in (
        ("/dev/kmsg", "kmsg"), ("/var/lib/docker/containers", "containers"), ("/proc/pressure/memory", "pressure")
    ):  # fmt: skip
        program = program.replace(path, str(tmp_path / instead))
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, check=True)
    assert json.loads(done.stdout) == [[MACHINE.format(number=3)], CALM, {HEX: 2}]


@dataclass
class Machines:
    """Answers as a machine whose services end, one state after the other; the last stays.

    Args:
        states: how often each service has ended, and how.
        journal: of each.
        is_ready: whether `ready` succeeds in time.
    """

    states: list[dict[str, tuple[int, str]]]
    journal: bytes = b"Traceback\nModuleNotFoundError: flask\n"
    is_ready: bool = True
    seconds: float = 0.0
    asked: list[list[str]] = field(default_factory=list)

    def run(self, argv: list[str], **_: Any) -> Completed:
        """Runs a program."""
        self.asked.append(argv)
        if argv[0] == "journalctl":
            return Completed(0, self.journal, b"")
        if argv[0] == "bash":
            if not self.is_ready:
                raise CommandTimeoutError("late")
            return Completed(0, b"", b"")
        states = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        blocks = [f"Id={name}.service\nNRestarts={ends}\nResult={result}\n" for name, (ends, result) in states.items()]
        return Completed(0, "\n".join(blocks).encode(), b"")

    def pause(self) -> None:
        """Waits a moment."""
        self.seconds += 1


BOX = Machine(name="box", services=(("web", "python3 app.py"),))


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Callable[[Machine, Machines], list[str]]:
    """Waits for a machine, by a clock of its own."""

    def waited(machine: Machine, machines: Machines) -> list[str]:
        monkeypatch.setattr("provisioner.inspect.services.time.monotonic", lambda: machines.seconds)
        return wait_until_ready(machine, cast(Calls, machines), machines.pause)

    return waited


Wait = Callable[[Machine, Machines], list[str]]


def test_services_that_stay_up_are_not_waited_for(wait: Wait) -> None:
    machines = Machines([{"web": (0, "success")}])
    assert wait(BOX, machines) == []
    assert (machines.seconds, len(machines.asked)) == (0, 1)
    assert wait(Machine(), machines) == []
    assert len(machines.asked) == 1


def test_a_service_that_never_stays_up_is_an_error_with_its_last_words(wait: Wait) -> None:
    machines = Machines([{"web": (number, "exit-code")} for number in range(1, 200)])
    with pytest.raises(NotUpError, match="web of machine box has ended 61 times, and does not stay up") as caught:
        wait(BOX, machines)
    assert caught.value.details == "Traceback\nModuleNotFoundError: flask"


def test_a_service_that_has_ended_three_times_and_stays_up_is_told(wait: Wait) -> None:
    machines = Machines([{"web": (number, "exit-code")} for number in (1, 2, 3)])
    [note] = wait(BOX, machines)
    assert note.startswith("The service web of machine box has ended 3 times. It said last:\nTraceback\n")
    assert machines.seconds == 12


def test_a_service_that_runs_again_and_again_by_design_is_told(wait: Wait) -> None:
    machines = Machines([{"web": (number, "success")} for number in range(1, 200)])
    [note] = wait(BOX, machines)
    assert "has ended 61 times" in note


@pytest.mark.parametrize(("ready", "text"), [(8000, "exec 3<>/dev/tcp/127.0.0.1/8000"), ("test -e /x", "test -e /x")])
def test_the_sample_waits_for_what_the_configuration_says(wait: Wait, ready: int | str, text: str) -> None:
    machines = Machines([{"web": (4, "exit-code")}])
    [note] = wait(BOX.model_copy(update={"ready": ready}), machines)
    assert machines.asked[0][-1] == text
    assert "has ended 4 times" in note
    assert machines.seconds == 0


def test_a_machine_that_does_not_become_ready_is_an_error_with_its_services_last_words(wait: Wait) -> None:
    machines = Machines([{"web": (1, "exit-code"), "db": (0, "success")}], is_ready=False)
    machine = BOX.model_copy(update={"ready": 80, "services": (*BOX.services, ("db", "sleep 9d"))})
    with pytest.raises(NotUpError, match="box is not ready: nothing listens at port 80 after 300 s") as caught:
        wait(machine, machines)
    assert "The service web of machine box has ended 1 times:\nTraceback" in str(caught.value.details)
    assert "db" not in str(caught.value.details)


def test_what_a_machine_says_is_bounded_and_printable(wait: Wait) -> None:
    machines = Machines([{"web": (9, "exit-code")}], journal=b"\x1b]0;title\x07 words\n" * 4000)
    [note] = wait(BOX.model_copy(update={"ready": "true"}), machines)
    assert len(note) < 2200
    assert "\x1b" not in note
    for garbage in ("Id=web.service\nNRestarts=" + "9" * 5000, "Id=other.service\nNRestarts=7", "\n\n\n=\n\n", "\0"):
        machines.run = lambda argv, said=garbage, **_: Completed(0, said.encode(), b"")  # type: ignore[method-assign]
        assert wait(BOX, machines) == []


def test_the_port_is_a_number_of_a_port() -> None:
    assert Machine(ready=80).ready == 80
    for wrong in (0, 70000, True, 1.5):
        with pytest.raises(ValueError, match="ready"):
            Machine.model_validate({"ready": wrong})
