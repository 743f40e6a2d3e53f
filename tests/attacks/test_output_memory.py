"""What a machine prints costs little memory and time wherever it is read, and its logs stay short on the disk.

The attacker is root in a machine, and replaces the helper: it prints many short lines, or a secret again and again, so
that each costs an object on the controller. At the most it costs the controller 300 MiB and some seconds.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import pytest

from provisioner.base.redaction import Redactor
from provisioner.driver.output_tee import LOG_LIMIT_BYTES
from provisioner.driver.task_driver import TaskDriver
from provisioner.ssh.connection import Connection
from provisioner.ssh.exchange import Completed
from tests.campaigns import cases
from tests.command_line import ROOT
from tests.waiting import BOUND_SECONDS

MEMORY_MIB = 300
SECONDS = 30

# Runs an attack on what reads a machine's output, and says what that cost.
PROGRAM = """
import json, os, pathlib, re, resource, sys, tempfile, time
from provisioner.cli.commands import logs
from provisioner.cli.output import Result, render
from provisioner.base.clock import now
from provisioner.environment import operations
from provisioner.base.errors import TaskError
from provisioner.family.scores import parse_intermediate
from provisioner.base.models import ScoreLogEntry
from provisioner.base.redaction import Redactor
from provisioner.driver.task_driver import STREAM_LIMIT_BYTES, TaskDriver
from provisioner.ssh.exchange import Completed
from provisioner.ssh.exchange import BoundedBuffer
from provisioner.store.images import installed_packages

MIB = 1 << 20
OK = b'{"status": "ok", "value": 1}'
ERROR = b'{"status": "error", "kind": "exception", "type": "E", "message": "m"}'
directory = pathlib.Path(sys.argv[2])

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1]) / 1024

class Machine:
    def __init__(self, piece, result):
        self.piece, self.result = piece, result

    def read_file(self, *arguments, **options):
        return self.result

    def run(self, argv, *, on_stdout=None, on_stderr=None, limit_bytes=8 * MIB, **options):
        streams = BoundedBuffer(limit_bytes), BoundedBuffer(limit_bytes)
        for buffer, listener in zip(streams, (on_stdout, on_stderr)):
            for _ in range(STREAM_LIMIT_BYTES // len(self.piece) if self.piece else 0):
                buffer.write(self.piece)
                listener(self.piece)
        return Completed(0, streams[0].value(), streams[1].value())

def called(piece, result, secret="s3cret-value", logs=directory):
    redactor = Redactor({"A_LONG_NAME_FOR_A_SHORT_SECRET_OF_A_TASK": secret})
    return TaskDriver(Machine(piece, result), "family", redactor, logs=logs).call("score", timeout_seconds=60)

def failed(piece, result):
    try:
        called(piece, result).value("start()")
    except TaskError as error:
        return error.details

def scored(piece, result):
    parsed = parse_intermediate(called(piece, result).result)
    entry = ScoreLogEntry(
        score=parsed.score, message=parsed.message, details=parsed.details, scored_at=now(), elapsed_seconds=1
    )
    try:
        return operations._extended((), entry)
    except TaskError as error:
        return error

def shown(piece, *, as_json):
    # As `provisioner logs` does once it has found the environment.
    for name in ("agent", "intermediate_score", "score", "start"):
        (directory / f"{name}.log").write_bytes(piece * (8 * MIB // len(piece)))
    with open("/dev/null", "w") as out:
        render(logs._shown("env", sorted(directory.glob("*.log")), None), as_json=as_json, out=out)

def printed(piece):
    # As `provisioner agent --json` does once the agent has ended.
    streams = [bytes(bytearray(piece * (8 * MIB // len(piece)))) for _ in range(2)]
    stdout, stderr = (Redactor({"A": "s3cr"}).redact(data.decode(errors="replace")) for data in streams)
    with open("/dev/null", "w") as out:
        render(Result({"stdout": stdout, "stderr": stderr}), as_json=True, out=out)

resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
attack = eval("lambda: " + sys.argv[1])
pathlib.Path("/proc/self/clear_refs").write_text("5")
before, begin = peak(), time.monotonic()
attack()
print(json.dumps([peak() - before, time.monotonic() - begin]))
"""

MESSAGE = 'b",".join(b\'"\\xf0\\x9f\\x98\\x80%x":"%x"\' % (n, n) for n in range(350_000))'
ATTACKS = {
    "short lines before a failure": "failed(b'ab\\n' * 20000, ERROR)",
    "a traceback of short lines": "failed(b'', ERROR[:-1] + b', \"traceback\": \"' + b'\\\\n' * (3 * MIB) + b'\"}')",
    "a secret in output": "called(b's3cr' * 15000, OK, 's3cr')",
    "a secret that repeats itself": "called(b'a' * 60000, OK, 'aaaa')",
    "no text": "called(b'\\xff' * 60000, OK)",
    "a secret in a result": "called(b'', b'\"' + b's3cr' * (2 * MIB - 4) + b'\"', 's3cr')",
    "a secret and wide characters": (
        "called(b'', b'[' + b','.join([b'\"\\xf0\\x9f\\x98\\x80' + b's3cr' * 200 + b'\"'] * 10000) + b']', 's3cr')"
    ),
    "a score and output": (
        f"scored(b'\\xf0\\x9f\\x98\\x80' + b'x' * 60000, OK[:-2] + b'{{\"message\":{{' + {MESSAGE} + b'}}}}}}')"
    ),
    "packages": "installed_packages(b'ab\\n\\n' * (4 * MIB))",
    "fields of packages": "installed_packages(b'a: b\\n' * (3 * MIB))",
    "output as JSON": "printed(b'\\xff')",
    "wide output as JSON": "printed(b'\\xf0\\x9f\\x98\\x80' + b'\\xff' * 60000)",
    "logs of short lines": "shown(b'ab\\n', as_json=False)",
    "logs of colours": "shown(b'a\\x1b[m', as_json=False)",
    "logs of wide characters": "shown(b'\\xf0\\x9f\\x98\\x80\\x01\\n', as_json=False)",
    "logs as JSON": "shown(b'\\xff\\n', as_json=True)",
    "wide logs as JSON": "shown(b'\\xf0\\x9f\\x98\\x80', as_json=True)",
}
# These take more than a few seconds.
LONG = {
    "a score and output",
    "a secret that repeats itself",
    "a secret and wide characters",
    "packages",
    "a secret in output",
}


@pytest.mark.parametrize("attack", cases(ATTACKS, left=LONG))
def test_output_costs_little(attack: str, tmp_path: Path) -> None:
    argv = [sys.executable, "-c", PROGRAM, ATTACKS[attack], str(tmp_path)]
    ended = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=BOUND_SECONDS, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    mib, seconds = json.loads(ended.stdout)
    print(f"{mib:6.1f} MiB {seconds:5.1f} s")
    assert mib < MEMORY_MIB


class Shouting:
    """Prints as much as the controller takes, with a number at the end, in place of the helper."""

    def __init__(self) -> None:
        self.calls = 0

    def read_file(self, *_: object, **__: object) -> bytes:
        return b'{"status": "ok", "value": 1}'

    def run(self, argv: Sequence[str], *, on_stdout: Callable[[bytes], None], **_: object) -> Completed:
        self.calls += 1
        on_stdout(b"call %d begins\n" % self.calls)
        for line in [b"x" * 65535 + b"\n"] * 240:
            on_stdout(line)
        on_stdout(b"call %d ends\n" % self.calls)
        return Completed(0, b"", b"")


def test_a_log_is_bounded_however_often_an_operation_is_called(tmp_path: Path) -> None:
    driver = TaskDriver(cast(Connection, Shouting()), "family", Redactor({}), logs=tmp_path)
    for _ in range(5):
        driver.call("intermediate_score", timeout_seconds=60)
    log = tmp_path / "intermediate_score.log"
    assert log.stat().st_size <= LOG_LIMIT_BYTES
    text = log.read_text()
    assert text.startswith("call 1 begins\n")
    assert text.endswith("call 5 ends\n")
