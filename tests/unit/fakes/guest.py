"""Answers as a machine would: from a script for the helper and root's commands, with a real shell for the agent's.

Root's commands are recognised and never run. An unexpected command fails the test.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pwd
import shlex
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
from tests.unit.fakes.probes import honest_answers, request_in
from tests.unit.fakes.sshd import Call, in_a_shell

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
        secrets_left: the lines that the search for secrets prints.
        sealed_with: the key that was removed from the disk before it became an image.
        agent_requests: the requests to the program that runs agents, in order.
        cgroup: what was asked of the agent's cgroup, in order; `cgroup_exit_code` is the answer.
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
    secrets_left: list[str] = field(default_factory=list)
    sealed_with: str = ""
    seal_exit_code: int = 0
    ttl_moved_to: int | None = None
    ttl_refusal: str = ""
    during: dict[str, Callable[[], None]] = field(default_factory=dict)
    agent_requests: list[dict[str, Any]] = field(default_factory=list)
    cgroup: list[str] = field(default_factory=list)
    cgroup_exit_code: int = 0
    _results: dict[str, str] = field(default_factory=dict)

    def request(self, operation: str) -> dict[str, Any]:
        """Returns the only request for an operation."""
        [request] = [request for request in self.requests if request["operation"] == operation]
        return request

    @property
    def operations(self) -> list[str]:
        """Returns the operations that were requested from the helper, in order."""
        return [request["operation"] for request in self.requests]

    def obey(self, call: Call) -> int:
        """Carries out a command and returns its exit code."""
        if call.user == "agent":
            if not self.home.exists():
                self.home.mkdir()
            return in_a_shell(call, {"HOME": str(self.home), "PATH": os.environ["PATH"]})
        assert call.user == "root", f"{call.user} runs {call.command}"
        if call.argv[0] == "sh" and call.argv[-2:-1] == ["copy"]:
            return self._copy_agent(call)
        if call.argv[-1].endswith("guest/agent.py"):
            return self._run_agent(call)
        stdin = call.stdin()
        if call.argv[:2] == ["runuser", "-u"]:
            assert call.argv[3] == "--", call.command[:300]
            self.ran_as.append(call.argv[2])
            call.argv = call.argv[4:]
        code, stdout, stderr = self._as_root(call, stdin)
        call.channel.sendall(stdout)
        call.channel.sendall_stderr(stderr)
        return code

    def _copy_agent(self, call: Call) -> int:
        """Unpacks an agent in the agent's home, as this process's user."""
        if not self.home.exists():
            self.home.mkdir()
        call.command = f"sh -c {shlex.quote(call.argv[-1].replace('/home/agent', str(self.home)))}"
        return in_a_shell(call)

    def _run_agent(self, call: Call) -> int:
        """Runs the real program, with a stand-in for the cgroup."""
        request = json.loads(call.stdin())
        assert (request["root"], request["user"], request["home"]) == ("/", "agent", "/home/agent")
        self.agent_requests.append(request)
        root = self.home.with_name(f"{self.home.name}-root")
        programs = root / "guest"
        if not programs.exists():
            programs.mkdir(parents=True)
            for name in ("agent.py", "provisioner_login.py", "provisioner_ring.py"):
                shutil.copy(GUEST / name, programs)
            (programs / "agent_cgroup.sh").write_text(CGROUP)
        user = pwd.getpwuid(os.geteuid()).pw_name
        here = request | {"root": str(root), "user": user, "home": str(self.home)}
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(programs / "agent.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdin is not None
        assert process.stdout is not None
        with process, contextlib.suppress(OSError, EOFError):
            try:
                process.stdin.write(json.dumps(here).encode())
                process.stdin.close()
                while data := process.stdout.read1(1 << 15):  # type: ignore[attr-defined]
                    call.channel.sendall(data)
            finally:
                process.kill()
        return process.returncode

    def _as_root(self, call: Call, stdin: bytes) -> tuple[int, bytes, bytes]:
        argv = call.argv
        if argv[:2] == ["python3", "-I"] and argv[2].endswith("guest/helper.py"):
            return 0, *self._help(json.loads(stdin))
        if argv == ["python3", "-I", "-S", "-"]:
            self.probe_requests.append(request_in(stdin))
            return 0, self.probes(self.probe_requests[-1]), b""
        if argv[:3] == ["python3", "-I", "-c"]:  # the search for secrets
            assert json.loads(stdin), "there is nothing to look for"
            return 0, "\n".join(self.secrets_left).encode(), b""
        if argv == ["cat", "/var/lib/dpkg/status"]:
            return 0, self.packages, b""
        if argv[0] == "journalctl":
            return 0, self.journal.encode(), b""
        if argv[:1] == ["sh"] and argv[1].endswith("agent_cgroup.sh"):
            self.cgroup.append(argv[2])
            if argv[2] == "end":
                self.kill_agent()
            return self.cgroup_exit_code, b"", b"processes of the agent do not end"
        assert argv[0] == "sh", f"nobody expects {call.command[:300]}"
        return self._run_script(call, stdin)

    def _run_script(self, call: Call, stdin: bytes) -> tuple[int, bytes, bytes]:
        argv, script = call.argv, call.argv[2]
        if argv[-1] in self._results:
            return 0, self._results.pop(argv[-1]).encode(), b""
        if argv[-1] == "move":
            self.ttl_moved_to = None if self.ttl_refusal else int(argv[-2])
            return int(bool(self.ttl_refusal)), b"", self.ttl_refusal.encode()
        if "seal /" in script:
            self.sealed_with = argv[-1]
            return self.seal_exit_code, b"", b""
        if "poweroff" in script:
            assert self.sealed_with, "a builder's own keys stay in the image"
            self.power_off()
            return 0, b"", b""
        if argv[1].endswith("/prepare.sh"):
            return self.package_exit_code, b"Unpacking curl\n", b"E: no curl\n" if self.package_exit_code else b""
        if "tar -x" in script:
            with tarfile.open(fileobj=io.BytesIO(stdin)) as archive:
                self.trees[argv[-1]] = set(archive.getnames())
            return 0, b"", b""
        assert "cat > " in script, f"nobody expects {call.command[:300]}"
        self.files[argv[4]] = stdin
        return 0, b"", b""

    def _help(self, request: dict[str, Any]) -> tuple[bytes, bytes]:
        operation = request["operation"]
        self.requests.append(request)
        assert operation in self.values, f"nobody expects the operation {operation}"
        if operation in self.during:
            self.during[operation]()
        value = self.values[operation]
        result: dict[str, Any] = {"status": "ok", "value": value}
        if isinstance(value, Fails):
            result = {"status": "error", "kind": "exception", "type": "ValueError", "message": value.message}
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
