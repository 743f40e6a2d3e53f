"""Starts a machine's egress proxy, as a program that outlives the process that starts it. Standard library only."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from provisioner import child_environment
from provisioner.clouds.local.vm.processes import is_alive, start_time

# The egress proxy counts there (egress_counters.py).
COUNTERS = "network.counters"


def start(theirs: socket.socket, allowed: list[dict[str, Any]] | None) -> None:
    """Starts the egress proxy on one end of a socket pair; `allowed` None means the whole internet.

    It ends when QEMU closes the other end. Its pid is kept for `destroy` all the same.
    """
    arguments = ["--fd", str(theirs.fileno()), "--log", "network.log", "--counters", COUNTERS]
    if allowed is None:
        arguments.append("--full-internet")
    for destination in allowed or ():
        arguments += ["--allow", f"{destination['cidr']}:{destination['port']}"]
    pid = start_program("provisioner.clouds.local.network.egress_proxy", *arguments, pass_fds=(theirs.fileno(),))
    Path("network.json").write_text(json.dumps({"pid": pid, "started": start_time(pid)}))


def start_program(module: str, *arguments: str, pass_fds: tuple[int, ...] = ()) -> int:
    """Starts one of our programs in the machine's directory, to outlive this one, and returns its pid."""
    argv = [sys.executable, "-m", module, *arguments]
    null = subprocess.DEVNULL
    return subprocess.Popen(
        argv, stdin=null, stdout=null, stderr=null, start_new_session=True, pass_fds=pass_fds,
        env=child_environment.for_python(os.environ),
    ).pid  # fmt: skip


def pid_of(directory: Path) -> int | None:
    """Returns the pid of the machine's egress proxy; None if it has ended."""
    try:
        process = json.loads((directory / "network.json").read_text())
    except (OSError, ValueError):
        return None
    return int(process["pid"]) if is_alive(process["pid"], process["started"]) else None
