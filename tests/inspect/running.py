"""Runs Inspect's command line on the tasks in evals.py and failing.py, and looks at what its evals leave."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import anyio
from inspect_ai.util import SandboxEnvironment

from provisioner.costs.ledger import Ledger
from provisioner.inspect.configuration import Configuration
from provisioner.inspect.sandbox import ProvisionerSandbox
from provisioner.store.environments import EnvironmentStore
from provisioner.store.home import Home

HERE = Path(__file__).parent
TASKS = HERE / "evals.py"
INSPECT = Path(sys.executable).with_name("inspect")


def command(*arguments: str) -> list[str]:
    """Returns the command line of Inspect."""
    return [str(INSPECT), *arguments]


def started(
    tmp_path: Path, task: str, *options: str, variables: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Starts `inspect eval` in a session of its own, as at a terminal.

    Args:
        tmp_path: where it runs, and logs.
        task: one of the tasks in evals.py; or with the name of its file or package.
    """
    name = task if "/" in task else f"{HERE}/{task}" if "@" in task else f"{TASKS}@{task}"
    settings = ("--model", "mockllm/model", "--display", "plain", "--log-dir", str(tmp_path))
    # What a shell starts in the background would ignore Ctrl-C.
    return subprocess.Popen(
        ["env", "--default-signal=INT,QUIT", *command("eval", name, *settings, *options)],
        cwd=tmp_path, env={**os.environ, **(variables or {})}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip


def said(process: subprocess.Popen[str], seconds: float = 600) -> str:
    """Waits for the end of a process, and returns what it said."""
    output, _ = process.communicate(timeout=seconds)
    return re.sub(r"\x1b\[[0-9;]*m", "", output)


def evals(home: Home) -> list[str]:
    """Returns the ids of the environments of evals."""
    return [kept.id for kept in EnvironmentStore(home).readable() if kept.batch.startswith("inspect-")]


def assert_nothing_left(home: Home, output: str = "") -> None:
    """Checks that evals have left neither environments nor reservations."""
    assert evals(home) == [], output
    assert Ledger(home.ledger).entries(unsettled=True) == [], output


def wait(process: subprocess.Popen[str], is_so: Callable[[], bool]) -> None:
    """Waits until something is so, while the eval runs."""
    deadline = time.monotonic() + 300
    while not is_so():
        assert time.monotonic() < deadline
        assert process.poll() is None, said(process)
        time.sleep(0.1)


def wait_for(home: Home, process: subprocess.Popen[str], status: str) -> None:
    """Waits until a sample's environment has come so far. Builders do not count: no log is begun before them."""
    wait(
        process, lambda: any((kept.kind, kept.status) == ("task", status) for kept in EnvironmentStore(home).readable())
    )


def brought_up(configuration: Configuration, metadata: dict[str, str]) -> dict[str, SandboxEnvironment]:
    """Brings up a sample's sandboxes, as Inspect does."""
    anyio.run(ProvisionerSandbox.task_init, "compose", configuration)
    return anyio.run(ProvisionerSandbox.sample_init, "compose", configuration, metadata)


def ended(configuration: Configuration, sandboxes: dict[str, SandboxEnvironment]) -> None:
    """Ends a sample, as Inspect does."""
    anyio.run(partial(ProvisionerSandbox.sample_cleanup, "compose", configuration, sandboxes, interrupted=False))
