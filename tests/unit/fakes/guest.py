"""Answers as a machine would: from a script for the helper and root's commands, with a real shell for the agent's.

Root's commands are recognised and never run. An unexpected command fails the test.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from provisioner.clouds.guest_files import GUEST
from tests.unit.fakes.exec_call import Call, in_a_shell
from tests.unit.fakes.probes import honest_answers, request_in

SETUP = {"standard_version": "0.5.0", "tasks": {"main": {"instructions": "Do it."}}, "has_score": True}
# Ends the agent's process group, where the real one ends its cgroup.
CGROUP = """
pid=$(dirname "$0")/$2.pid
case $1 in
    join) echo "$3" > "$pid" ;;
    kill) kill -KILL "-$(cat "$pid")" ;;
esac
true
"""


@dataclass(frozen=True)
class Fails:
    """Makes an operation of the helper raise an exception."""

    message: str = "it broke"
    type: str = "ValueError"


@dataclass
class Guest:
    """Plays the inside of one machine. Tests set its answers beforehand and look at its requests afterwards.

    Attributes:
        values: the return value of each operation of the helper; Fails for an exception. Others are unexpected.
        says: the output of operations, by operation.
        probes: answers the isolation probes' request.
        requests: the requests to the helper, in order.
        trees, files: the files that root copied into the machine, by destination.
        ran_as: the users as whom root ran commands.
        programs: the output of other programs that root runs, by name.
        secrets_left: the lines that the search for secrets prints.
        cloud_init: whether it is there, at each question; the last answer stays.
        sealed_with: the key that was removed from the disk before it became an image.
        agent_requests: the requests to the program that runs agents, in order.
        cgroup: what was asked of the agent's cgroup, in order; `cgroup_exit_code` is the answer.
        renewal: what taking new credentials does, in a machine that resumed from a snapshot; None if it refuses.
        memory: what it says of its memory and of services that were started again (inspect/memory.py).
        ttl_moved_to: the new time of the timer in the machine; `ttl_refusal` is the error that it gives instead.
    """

    home: Path
    power_off: Callable[[], None]
    values: dict[str, Any] = field(
        default_factory=lambda: {
            "start": None, "settle_home": None, "teardown": None, "score": 0.5, "install": None, "shell": None,
            "setup": SETUP, "read_submission": {"found": True, "text": "42"}, "pytest": {"exit_code": 0},
            "intermediate_score": {"score": 0.25, "message": {"a": 1}, "details": {"b": 2}}, "aggregate_scores": 0.75,
        }
    )  # fmt: skip
    says: dict[str, str] = field(default_factory=dict)
    probes: Callable[[dict[str, Any]], bytes] = honest_answers
    journal: str = "a journal\n"
    requests: list[dict[str, Any]] = field(default_factory=list)
    probe_requests: list[dict[str, Any]] = field(default_factory=list)
    trees: dict[str, set[str]] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    ran_as: list[str] = field(default_factory=list)
    package_exit_code: int = 0
    packages: bytes = b"Package: curl\nStatus: install ok installed\nArchitecture: amd64\nVersion: 7.88.1-10\n"
    programs: dict[str, bytes] = field(default_factory=dict)
    secrets_left: list[str] = field(default_factory=list)
    sealed_with: str = ""
    seal_exit_code: int = 0
    cloud_init: tuple[bool, ...] = (True,)
    renewal: Callable[[], None] | None = None
    memory: list[Any] = field(default_factory=lambda: [[], "", {}])
    ttl_moved_to: int | None = None
    ttl_refusal: str = ""
    during: dict[str, Callable[[], None]] = field(default_factory=dict)
    agent_requests: list[dict[str, Any]] = field(default_factory=list)
    cgroup: list[str] = field(default_factory=list)
    cgroup_exit_code: int = 0
    _results: dict[str, str] = field(default_factory=dict)
    _agent_programs: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def close(self) -> None:
        """Ends what runs in the machine."""
        self.kill_agent()
        for process in self._agent_programs:
            process.kill()
            process.wait()

    def request(self, operation: str) -> dict[str, Any]:
        """Returns the only request for an operation."""
        [request] = [request for request in self.requests if request["operation"] == operation]
        return request

    @property
    def operations(self) -> list[str]:
        """Returns the operations that were requested from the helper, in order."""
        return [request["operation"] for request in self.requests]

    def obey(self, call: Call) -> int | None:
        """Carries out a command and returns its exit code."""
        if call.user == "agent":
            if not self.home.exists():
                self.home.mkdir()
            if "scaffolding" in call.command:
                self._copy_agent(call)
            else:
                in_a_shell(call, self._login)
            return None
        if call.argv[0] == "agent.py":
            return self._run_agent(call)
        stdin = call.stdin()
        if call.user != "root":
            self.ran_as.append(call.user)
        code, stdout, stderr = self._renew() if call.argv[0] == "renew" else self._as_root(call, stdin)
        call.say(stdout, stderr)
        return code

    @property
    def _login(self) -> dict[str, str]:
        return {"HOME": str(self.home), "PATH": os.environ["PATH"]}

    def _copy_agent(self, call: Call) -> None:
        """Unpacks an agent in the agent's home, as this process's user."""
        call.request["argv"] = [text.replace("/home/agent", str(self.home)) for text in call.argv]
        in_a_shell(call, self._login)

    def _run_agent(self, call: Call) -> int:
        """Runs the real program, with a stand-in for the cgroup."""
        request = json.loads(call.stdin())
        assert (request["root"], request["user"], request["home"]) == ("/", "agent", "/home/agent")
        self.agent_requests.append(request)
        root = self.home.with_name(f"{self.home.name}-root")
        programs = root / "guest"
        if not programs.exists():
            package = programs / "provisioner_guest"
            package.mkdir(parents=True)
            for name in ("agent.py", "provisioner_guest/__init__.py", "provisioner_guest/login.py"):
                shutil.copy(GUEST / name, programs / name)
            (package / "cgroup.py").write_text("def outlive_call():\n    pass\n")
            (programs / "agent_cgroup.sh").write_text(CGROUP)
        user = pwd.getpwuid(os.geteuid()).pw_name
        here = request | {"root": str(root), "user": user, "home": str(self.home)}
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(programs / "agent.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._agent_programs.append(process)
        assert process.stdin is not None
        assert process.stdout is not None
        with process, contextlib.suppress(OSError, EOFError):
            try:
                process.stdin.write(json.dumps(here).encode())
                process.stdin.close()
                while data := process.stdout.read1(1 << 15):  # type: ignore[attr-defined]
                    call.say(data)
            finally:
                process.kill()
        return process.returncode

    def _as_root(self, call: Call, stdin: bytes) -> tuple[int, bytes, bytes]:
        argv = call.argv
        if argv == ["agent_end.py"]:
            self.cgroup.append("end")
            self.kill_agent()
            return self.cgroup_exit_code, b"", b"processes of the agent do not end"
        if call.request["operation"] == "read" and call.request["path"] == "/":
            return errno.EISDIR, b"", b""
        if call.request["operation"] != "execute":
            return 0, *self._as_programs(call, stdin)
        if argv == ["cat", "/var/lib/dpkg/status"]:
            return 0, self.packages, b""
        if argv[0] == "journalctl":
            return 0, self.journal.encode(), b""
        if argv[:1] == ["sh"] and argv[1].endswith("agent_cgroup.sh"):
            self.cgroup.append(argv[2])
            return self.cgroup_exit_code, b"", b"processes of the agent do not end"
        if argv[0] in self.programs:
            return 0, self.programs[argv[0]], b""
        assert argv[0] == "sh", f"unexpected: {call.command[:300]}"
        return self._run_script(call, stdin)

    def _renew(self) -> tuple[int, bytes, bytes]:
        if self.renewal is None:
            return 1, b"", b"the port is busy"
        self.renewal()
        return 0, b"", b""

    def _as_programs(self, call: Call, stdin: bytes) -> tuple[bytes, bytes]:
        """Reads or writes a file, or answers as a program that the controller sent."""
        match call.request["operation"], call.argv[0]:
            case "read", _:
                return self._results.pop(call.request["path"]).encode(), b""
            case "write", _:
                self.files[call.request["path"]] = stdin
                return b"", b""
            case _, "copy_program.py":
                return self._copy(call, stdin)
            case _, "helper.py":
                return self._help(json.loads(stdin))
            case _, "probe.py":
                self.probe_requests.append(request_in(call.program))
                return self.probes(self.probe_requests[-1]), b""
            case _, "memory":
                return json.dumps(self.memory).encode(), b""
            case _, "secret_scan.py":
                assert json.loads(stdin), "there is nothing to look for"
                return "\n".join(self.secrets_left).encode(), b""
        raise AssertionError(f"unexpected program: {call.argv[0]}")

    def _copy(self, call: Call, stdin: bytes) -> tuple[bytes, bytes]:
        match call.argv[1:]:
            case "fill", directory, *_:
                with tarfile.open(fileobj=io.BytesIO(stdin)) as archive:
                    self.trees[directory] = set(archive.getnames())
            case "write", path, _, ("644" | "755"):
                self.files[path] = stdin
            case unexpected:
                raise AssertionError(f"unexpected copy by {unexpected}")
        return b"", b""

    def _run_script(self, call: Call, stdin: bytes) -> tuple[int, bytes, bytes]:
        argv, script = call.argv, call.argv[2]
        if argv[-1] == "move":
            self.ttl_moved_to = None if self.ttl_refusal else int(argv[-2])
            return int(bool(self.ttl_refusal)), b"", self.ttl_refusal.encode()
        if script == "sync":
            return 0, b"", b""
        if "cloud-init" in script:
            return self._follow_cloud_init(argv, stdin), b"", b""
        if "seal /" in script:
            self.sealed_with = argv[-1]
            return self.seal_exit_code, b"", b""
        if "poweroff" in script:
            assert self.sealed_with, "a builder's own keys stay in the image"
            self.power_off()
            return 0, b"", b""
        if argv[1].endswith("/prepare.sh"):
            return self.package_exit_code, b"Unpacking curl\n", b"E: no curl\n" if self.package_exit_code else b""
        raise AssertionError(f"unexpected: {call.command[:300]}")

    def _follow_cloud_init(self, argv: list[str], stdin: bytes) -> int:
        """Waits for its end, or takes its place at later boots; returns the exit code."""
        if "provisioner-later-boots" in argv[2]:
            assert argv[-1].isdigit(), "a later boot sets the time to live"
            assert b"provisioner-ttl" in stdin
            return 0
        there, *later = self.cloud_init
        self.cloud_init = tuple(later) or (there,)
        return int(not there)

    def _help(self, request: dict[str, Any]) -> tuple[bytes, bytes]:
        operation = request["operation"]
        self.requests.append(request)
        assert operation in self.values, f"unexpected operation: {operation}"
        if operation in self.during:
            self.during[operation]()
        value = self.values[operation]
        result: dict[str, Any] = {"status": "ok", "value": value}
        if isinstance(value, Fails):
            result = {"status": "error", "kind": "exception", "type": value.type, "message": value.message}
        self._results[request["result"]] = json.dumps(result)
        return self.says.get(operation, "").encode(), b""

    def kill_agent(self) -> None:
        """Ends the agent's processes: here, all that have this machine's HOME."""
        mark = f"HOME={self.home}".encode()
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    os.kill(int(process.name), signal.SIGKILL)
            except OSError:
                continue
