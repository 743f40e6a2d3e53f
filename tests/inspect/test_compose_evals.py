"""Shows that evals with a compose file or a Dockerfile alone run unchanged in real machines, up to the score."""

from __future__ import annotations

import json
import mmap
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.log import read_eval_log
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.util import SandboxEnvironment, SandboxEnvironmentSpec, sandbox

from provisioner.inspect.configuration import configuration_of
from provisioner.inspect.machine_family import SOURCES
from provisioner.store.environments import EnvironmentStore
from provisioner.store.home import Home
from provisioner.store.images import ImageStore
from tests.homes import cache
from tests.inspect.epochs import Meeting, beginning
from tests.inspect.images import DEBIAN, DOCKERFILE, debian_archive, registry_of_archives
from tests.inspect.mirror import mirror
from tests.inspect.running import assert_nothing_left, brought_up, ended, said, started
from tests.local.test_isolation import host_address, listening
from tests.unit.environment.test_allowlist import answer

EXAMPLES = Path(__file__).parents[2] / "examples" / "inspect"
SOLUTION = b"The albatross is the solution. "
# A busy host's, between a machine's clock and a look at this one's.
LATE_SECONDS = 60
ASK = "exec 3<>/dev/tcp/keeper/7000; echo Please, tell me. >&3"

pytestmark = [
    pytest.mark.vm,
    pytest.mark.timeout(3600),
    pytest.mark.xdist_group("compose"),
]


@pytest.fixture
def source(tmp_path: Path) -> Iterator[str]:
    """A mirror of the Docker Hub. Only root can give it a network of its own; others get the archives."""
    if os.geteuid() != 0:
        yield registry_of_archives()
        return
    (tmp_path / "mirror").mkdir()
    with mirror(debian_archive(cache()), f"library/{DEBIAN}", cache(), tmp_path / "mirror") as address:
        yield address


def _told(sandbox: SandboxEnvironment, command: str) -> str:
    """Returns what a command in a sandbox prints."""
    done = anyio.run(partial(sandbox.exec, ["bash", "-c", command], timeout=120))
    return done.stdout.strip() or done.stderr.strip()


def test_a_dockerfile_alone_is_an_eval(home: Home, source: str, tmp_path: Path) -> None:
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "Dockerfile").write_text(DOCKERFILE)
    # The Dockerfile copies it nowhere.
    (tmp_path / "eval" / "solution.txt").write_bytes(SOLUTION * 100_000)
    configuration = configuration_of(str(tmp_path / "eval" / "Dockerfile")).model_copy(update={"registry": source})
    sandboxes = brought_up(configuration, {})
    try:
        assert list(sandboxes) == ["default"]
        assert _told(sandboxes["default"], "cat /built; pwd") == "built\n/srv/work"
        assert _told(sandboxes["default"], "cat /proc/net/dev | grep -c eth0 || true") == "0"
        [environment] = EnvironmentStore(home).readable()
        listed = subprocess.run(
            [sys.executable, "-m", "provisioner", "exec", environment.id, "--user", "root", "--", "ls", "/root"],
            stdout=subprocess.PIPE, check=True, text=True,
        )  # fmt: skip
        assert "sandbox.py" in listed.stdout.split()
        assert not {SOURCES, "build_steps.json"} & set(listed.stdout.split())
        disk = ImageStore(home).disk(environment.machines["primary"].image)
        with disk.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as read:
            assert re.search(SOLUTION, read) is None
    finally:
        ended(configuration, sandboxes)


def test_a_service_reaches_an_allowed_destination_by_its_name(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = host_address()
    ask, named = socket.getaddrinfo, answer({"service.example": [address]})
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *rest: (named if host == "service.example" else ask)(host, *rest)
    )
    with listening(address) as (port, visitors), listening(address) as (closed, none):
        file = {
            "services": {"default": {"image": DEBIAN, "x-local": True, "command": "sleep infinity"}},
            "x-provisioner": {"allow": [f"service.example:{port}"]},
        }
        (tmp_path / "compose.yaml").write_text(json.dumps(file))
        configuration = configuration_of(str(tmp_path / "compose.yaml")).model_copy(
            update={"registry": registry_of_archives()}
        )
        sandboxes = brought_up(configuration, {})
        try:
            talk = "exec 3<>/dev/tcp/service.example/{port}; echo hello >&3; head -c7 <&3"
            assert _told(sandboxes["default"], talk.format(port=port)) == "welcome"
            assert "welcome" not in _told(sandboxes["default"], f"timeout 3 bash -c '{talk.format(port=closed)}'")
        finally:
            ended(configuration, sandboxes)
    assert b"hello\n" in visitors
    assert none == []
    assert_nothing_left(home)


def test_the_example_is_solved_by_a_scripted_model(home: Home, tmp_path: Path) -> None:
    where = {"compose": str(EXAMPLES / "containers" / "compose.yaml"), "registry": registry_of_archives()}
    (tmp_path / "provisioner.yaml").write_text(json.dumps(where))
    script = ("--solver", str(EXAMPLES / "scripted.py"), "-S", f"command={ASK}; id -un; cat <&3")
    sandbox = ("--sandbox", f"provisioner:{tmp_path / 'provisioner.yaml'}")
    output = said(started(tmp_path, f"{EXAMPLES}/two_containers.py@two_containers", *sandbox, *script), 2400)
    [written] = tmp_path.glob("*.eval")
    log = read_eval_log(str(written))
    assert log.status == "success", output
    [sample] = log.samples or []
    assert sample.output.completion.split("\n")[:2] == ["agent", "The word is cormorant."]
    assert sample.scores is not None
    assert sample.scores["includes"].value == "C"
    assert_nothing_left(home, output)


@solver
def ask_in_each_sample(home: Home, seen: dict[object, dict[str, Any]]) -> Solver:
    """Asks the other service, and notes what a sample has of its own, while the other sample's services run."""
    here, seen_by_both = Meeting(2), Meeting(2)

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        found: dict[str, Any] = {"files": (await sandbox().exec(["ls", "given"])).stdout.split()}
        asked = await sandbox().exec(["bash", "-c", f"{ASK}; test ! -e mark && echo {state.sample_id} > mark; cat <&3"])
        found["answer"] = asked.stdout.strip()
        found["started"] = (await sandbox("keeper").exec(["cat", "/proc/1/stat"])).stdout.split()[21]
        found["drawn"] = (await sandbox().exec(["bash", "-c", "head -c 16 /dev/urandom | base64"])).stdout
        found["clock"] = (await sandbox("keeper").exec(["date", "+%s"])).stdout
        found["now"] = str(time.time())
        await here.wait()
        found["mark"] = (await sandbox().exec(["cat", "mark"])).stdout.strip()
        found["proofs"] = [len(kept.probes) for kept in EnvironmentStore(home).readable() if kept.batch]
        seen[state.sample_id] = found
        await seen_by_both.wait()
        return state

    return solve


@pytest.mark.filterwarnings("default")  # Inspect's own deprecations
def test_samples_start_from_one_project_whose_services_are_up(home: Home, tmp_path: Path) -> None:
    where = {"compose": str(EXAMPLES / "containers" / "compose.yaml"), "registry": registry_of_archives()}
    (tmp_path / "provisioner.yaml").write_text(json.dumps({**where, "fork": "samples"}))
    seen: dict[object, dict[str, Any]] = {}
    spec = SandboxEnvironmentSpec("provisioner", configuration_of(str(tmp_path / "provisioner.yaml")))
    samples = [
        Sample(input="hello", id=name, files={f"given/{name}": name}, setup=f"touch given/setup-{name}")
        for name in ("one", "two")
    ]
    task = Task(dataset=samples, solver=ask_in_each_sample(home, seen), sandbox=spec)
    [log] = eval(task, model="mockllm/model", max_samples=2, max_sandboxes=2, log_dir=str(tmp_path))
    assert log.status == "success", log.error
    assert [sample.error for sample in log.samples or []] == [None, None]
    for name, found in seen.items():
        assert set(found["files"]) == {name, f"setup-{name}"}
        assert (found["answer"], found["mark"]) == ("The word is cormorant.", name)
        assert abs(int(found["clock"]) - float(found["now"])) < LATE_SECONDS
        assert len(found["proofs"]) == 2
        assert all(found["proofs"])
    one, two = seen["one"], seen["two"]
    assert one["started"] == two["started"]
    assert one["drawn"] != two["drawn"]
    first, copy = sorted(map(beginning, log.samples or []), key=lambda each: each["frozen_as"] is None)
    assert (first["forked_from"], copy["forked_from"]) == (None, first["environment"])
    assert {"services", "freeze"} < set(first["phases"])
    assert copy["phases"]["services"] < first["phases"]["services"]
    assert [each["isolation"]["proven"] for each in (first, copy)] == [True, True]
    assert_nothing_left(home)
