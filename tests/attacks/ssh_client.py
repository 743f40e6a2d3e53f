"""Connects to a hostile SSH server, runs a command, and prints what that cost. A process of its own is measured.

Usage: python -m tests.attacks.ssh_client JSON
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import resource
import sys
import time
from pathlib import Path
from typing import Any

from provisioner.base.models import Endpoint
from provisioner.ssh import connection as ssh
from provisioner.ssh.keys import Login
from tests.waiting import BOUND_SECONDS

# What the host must survive if the attack succeeds.
ADDRESS_SPACE_BYTES = 3 << 30


def main() -> None:
    """Runs one command on the server and prints the outcome as a line of JSON."""
    request = json.loads(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
    ssh.HANDSHAKE_SECONDS = request["answer_seconds"] or ssh.HANDSHAKE_SECONDS
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak
    before, begin = _peak_mib(), time.monotonic()
    outcome: dict[str, Any] = {"error": None, "message": ""}
    with contextlib.ExitStack() as stack:
        try:
            login = Login(
                Endpoint(host="127.0.0.1", port=request["port"]), "root", Path(request["key"]), request["host_key"]
            )
            patience = request["answer_seconds"] or BOUND_SECONDS
            connection = stack.enter_context(ssh.Connection(login, wait_seconds=patience))
            for _ in range(request["times"]):
                stdin = io.BytesIO(bytes(request["stdin_bytes"]))
                done = connection.run(["attack"], stdin=stdin, timeout_seconds=request["timeout_seconds"])
            outcome |= {"exit_code": done.exit_code, "output_bytes": len(done.stdout)}
        except BaseException as error:
            kinds = [kind.__name__ for kind in type(error).__mro__]
            outcome |= {"error": kinds[0], "kinds": kinds, "message": str(error)}
        seconds = time.monotonic() - begin
    print(json.dumps(outcome | {"seconds": seconds, "mib": _peak_mib() - before}))


def _peak_mib() -> float:
    """Returns the most memory that this process ever had resident."""
    match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match
    return int(match[1]) / 1024


if __name__ == "__main__":
    main()
