"""JSON that costs far more as objects than as text is refused before it becomes objects.

The attacker is root in a machine, and writes the result of an operation itself. At the most it costs the controller 300
MiB and some seconds.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.campaigns import cases
from tests.command_line import ROOT
from tests.waiting import BOUND_SECONDS

MEMORY_MIB = 300
SECONDS = 30

# Reads a result as the driver does, with a redactor, and says what that cost.
PROGRAM = """
import json, pathlib, re, resource, sys, time
from provisioner.base.redaction import Redactor
from provisioner.driver.task_driver import TaskDriver
from provisioner.ssh.exchange import Completed

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1]) / 1024

class Machine:
    def run(self, argv, **options):
        return Completed(0, b"", b"")

    def read_file(self, *arguments, **options):
        return result

resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
result = eval(sys.argv[1])
driver = TaskDriver(Machine(), "family", Redactor({"TOKEN": "s3cret-value"}))
pathlib.Path("/proc/self/clear_refs").write_text("5")
before, begin = peak(), time.monotonic()
answer = driver.call("score", timeout_seconds=60).result
print(json.dumps([peak() - before, time.monotonic() - begin, isinstance(answer, dict) and answer.get("kind")]))
"""

BOMBS = {
    "lists": 'b"[" + b"[]," * 3_000_000 + b"[]]"',
    "objects": 'b"[" + b"{}," * 2_700_000 + b"{}]"',
    "allowed objects": 'b"[" + b"{}," * 490_000 + b"{}]"',
    "allowed keys": 'b"{" + b",".join(b\'"%d":1\' % n for n in range(495_000)) + b"}"',
    "allowed strings": '("[" + ",".join(\'"\\U0001f600%x"\' % n for n in range(600_000)) + "]").encode()',
    "depth": 'b"[" * (8 << 20)',
    "nested objects": "b'{\"a\":' * 1_500_000",
    "digits": 'b"9" * (8 << 20)',
    "quotes": "b'\"' * (8 << 20)",
    "seventeen": 'b"[" + b"[]," * 5_900_000 + b"[]]"',
}
# These take more than a few seconds.
LONG = {"allowed strings", "allowed keys"}


@pytest.mark.parametrize("bomb", cases(BOMBS, left=LONG))
def test_a_result_that_is_a_bomb_costs_little(bomb: str) -> None:
    argv = [sys.executable, "-c", PROGRAM, BOMBS[bomb]]
    ended = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=BOUND_SECONDS, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    mib, seconds, kind = json.loads(ended.stdout)
    print(f"{mib:6.1f} MiB {seconds:5.1f} s  {kind}")
    assert mib < MEMORY_MIB
    assert bomb.startswith("allowed") or kind == "invalid"
