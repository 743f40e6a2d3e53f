"""Shows that `inspect view` opens logs with configurations of other versions."""

from __future__ import annotations

import json
import socket
import subprocess
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageAssistant
from inspect_ai.solver import Generate, Solver, TaskState, solver

from tests.browser import chromium
from tests.inspect.running import command
from tests.ports import reserved_port
from tests.waiting import BOUND_SECONDS, until

OF_TOMORROW = {
    "type": "provisioner",
    "config": {"cloud": "moon", "machines": [{"name": "NOT a name", "phase": {"x": [1]}}], "tides": True},
}

pytestmark = pytest.mark.filterwarnings("default")  # Inspect's own deprecations


@solver
def answer() -> Solver:
    """Answers without a model."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        state.messages.append(ChatMessageAssistant(content="It was seen."))
        return state

    return solve


def log_of_tomorrow(directory: Path) -> None:
    """Writes the log of an eval, as if a later version of this package had configured its machines."""
    task = Task(dataset=[Sample(input="What was seen?")], solver=answer(), name="of_tomorrow")
    [log] = eval(task, model="mockllm/model", log_dir=str(directory), display="none")
    assert log.status == "success", log.error
    with zipfile.ZipFile(log.location) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    changed = 0
    with zipfile.ZipFile(log.location, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            data = json.loads(content)
            for configured in (data, data.get("eval")) if isinstance(data, dict) else ():
                if isinstance(configured, dict) and ("task_id" in configured or "epoch" in configured):
                    configured["sandbox"] = OF_TOMORROW
                    changed += 1
            archive.writestr(name, json.dumps(data))
    assert changed == 3  # the eval, at its start and its end, and the sample


@contextmanager
def viewed(directory: Path, written: Path) -> Iterator[str]:
    """Runs `inspect view` on a directory of logs, and returns its address.

    Args:
        written: the file for what it writes.
    """
    with reserved_port() as port, written.open("w") as output:
        view = command("view", "start", "--log-dir", str(directory), "--port", str(port))
        with subprocess.Popen(view, stdout=output, stderr=output) as server:

            def serves() -> bool:
                assert server.poll() is None, written.read_text()
                with socket.socket() as client:
                    return client.connect_ex(("127.0.0.1", port)) == 0

            try:
                until(serves)
                yield f"http://127.0.0.1:{port}/"
            finally:
                server.terminate()


def test_a_log_of_another_version_is_shown(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    log_of_tomorrow(logs)
    with viewed(logs, tmp_path / "written.txt") as address, chromium() as browser:
        page = browser.new_page()
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.set_default_timeout(BOUND_SECONDS * 1000)
        page.goto(address)
        page.get_by_text("What was seen?").first.wait_for()
        page.get_by_role("tab", name="Messages").click()
        page.get_by_text("It was seen.").first.wait_for()
        assert errors == []
