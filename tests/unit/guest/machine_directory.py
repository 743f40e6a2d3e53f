"""Provides a directory in which the helper runs as if in a machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from provisioner.clouds.guest_files import GUEST
from tests.unit.fakes.exec_call import GUEST_PYTHON
from tests.waiting import BOUND_SECONDS

MIB = 1024 * 1024


@dataclass
class Answer:
    """The result and output of one run of the helper."""

    result: dict[str, Any]
    stdout: str
    stderr: str

    @property
    def value(self) -> Any:
        """The value of an operation that must have succeeded."""
        assert self.result["status"] == "ok", (self.result, self.stderr)
        return self.result["value"]


class Machine:
    """A directory that serves as a machine's root; agent and protected are the user who runs the tests."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.family = root / "root"
        self.home = root / "home/agent"
        self.python = GUEST_PYTHON
        # Where the family's Python is: that of the tests.
        self.path = f"{Path(sys.executable).parent}:{os.defpath}"
        for directory in (self.family, self.home, root / "protected", root / "etc"):
            directory.mkdir(parents=True)
        self.agent_uid, self.protected_gid = (1000, 990) if os.geteuid() == 0 else (os.getuid(), 4242)
        uid, gid = self.agent_uid, 1000 if os.geteuid() == 0 else os.getgid()
        (root / "etc/passwd").write_text(f"agent:x:{uid}:{gid}::{self.home}:/bin/bash\n")
        (root / "etc/group").write_text(f"agent:x:{gid}:\nprotected:x:{self.protected_gid}:\n")

    def write_family(self, body: str, *, before: str = "") -> None:
        """Write fam.py: a family of the task `main`, with `body` in its class. It has imported json, os and random."""
        head = "class TaskFamily:\n    get_tasks = staticmethod(lambda: {'main': {'word': 'abandon'}})\n"
        module = head + textwrap.indent(textwrap.dedent(body), "    ")
        (self.family / "fam.py").write_text(f"import json, os, random\n{textwrap.dedent(before)}{module}")

    def write_start(self, body: str) -> None:
        """Write a family whose start() has this body."""
        self.write_family(f"@staticmethod\ndef start(t):\n{textwrap.indent(textwrap.dedent(body).strip(), '    ')}\n")

    def start(self, operation: str, **keys: Any) -> subprocess.Popen[bytes]:
        """Start the helper with a request."""
        request = {
            "operation": operation,
            "family": "fam",
            "task": "main",
            "environment": {},
            "result": str(self.root / "results/result.json"),
            "output_limit_bytes": MIB,
            "timeout_seconds": BOUND_SECONDS,
            "root": str(self.root),
            **keys,
        }
        if self.path:
            request["environment"] = {"PATH": self.path, **request["environment"]}
        process = subprocess.Popen(
            [self.python, "-B", str(GUEST / "helper.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "LEAKED_FROM_THE_LOGIN": "1"},
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(request).encode())
        process.stdin.close()
        process.stdin = None
        return process

    def setup(self, body: str, *, before: str = "", **given: str) -> Any:
        """Write a family, and return its setup data, read with these variables."""
        self.write_family(body, before=before)
        return self.run("setup", given=given).value

    def run(self, operation: str, **keys: Any) -> Answer:
        """Run the helper to its end."""
        process = self.start(operation, **keys)
        stdout, stderr = process.communicate(timeout=BOUND_SECONDS)
        assert process.returncode == 0, stderr.decode()
        result = json.loads(Path(keys.get("result", self.root / "results/result.json")).read_bytes())
        return Answer(result, stdout.decode(), stderr.decode())

    def score(self, body: str, *, before: str = "", submission: str = "abandon", **keys: Any) -> Answer:
        """Run score() with this body."""
        lines = textwrap.indent(textwrap.dedent(body).strip(), "    ")
        self.write_family(f"@staticmethod\ndef score(t, submission):\n{lines}\n", before=before)
        (self.root / "submission").write_bytes(submission.encode())
        return self.run("score", submission=str(self.root / "submission"), **keys)
