"""Shows that the epochs of a sample start from one environment that ran, and are environments of their own."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.util import SandboxEnvironmentSpec, sandbox

from provisioner.clouds.local.frozen.templates import MEMORY
from provisioner.costs.ledger import Ledger
from provisioner.inspect.configuration import Configuration, Machine
from provisioner.store.environments import EnvironmentStore
from provisioner.store.home import UNFINISHED, Home
from provisioner.store.snapshots import SnapshotStore
from tests.inspect.epochs import Meeting, beginning
from tests.inspect.running import assert_nothing_left, command, said, started, wait
from tests.local.test_interruptions import processes_of

EPOCHS = 3
# Of a machine's memory: the rest follows for a second at least.
LEAST_WRITTEN_BYTES = 8 << 20
# start() draws a word, and starts a process that counts.
FAMILY = """
import subprocess, uuid
from pathlib import Path

class TaskFamily:
    standard_version = "0.5.0"

    @staticmethod
    def get_tasks():
        return {"main": {}}

    @staticmethod
    def get_instructions(t):
        return ""

    @staticmethod
    def start(t):
        Path("/home/agent/word").write_text(str(uuid.uuid4()))
        count = "n=$((n + 1)); echo $n > /root/.count; mv /root/.count /root/count; sleep 0.2"
        Path("/root/count.sh").write_text("n=0; while :; do " + count + "; done")
        subprocess.run(["systemd-run", "--unit=counter", "sh", "/root/count.sh"], check=True)
"""
OWN = "cat /proc/sys/kernel/random/boot_id; cat /etc/ssh/ssh_host_ed25519_key; head -c 16 /dev/urandom | base64"
COUNTS = """
before=$(cat /root/count)
for _ in $(seq 100); do
    [ "$(cat /root/count)" = "$before" ] || exit 0
    sleep 0.2
done
exit 1
"""

pytestmark = [
    pytest.mark.vm,
    pytest.mark.timeout(1800),
    pytest.mark.xdist_group("evals"),
    pytest.mark.filterwarnings("default"),  # Inspect's own deprecations
]


async def _said(command: str, user: str = "root", machine: str | None = None) -> str:
    done = await sandbox(machine).exec(["bash", "-c", command], user=user, timeout=120)
    assert done.success, done
    return done.stdout.strip()


@solver
def compare(home: Home, seen: dict[int, dict[str, Any]]) -> Solver:
    """Looks at what an epoch has of the frozen machine, and changes a file while the other epochs run."""
    meetings: list[Meeting] = []

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        if not meetings:
            meetings.extend((Meeting(EPOCHS), Meeting(EPOCHS), Meeting(EPOCHS)))
        await _said("test ! -e /home/agent/mark")
        await _said(f"echo {state.epoch} > /home/agent/mark", user="agent")
        await meetings[0].wait()
        assert await _said("cat /home/agent/mark") == str(state.epoch)
        await _said(COUNTS)
        seen[state.epoch] = {"word": await _said("cat /home/agent/word"), "own": await _said(OWN)}
        await meetings[1].wait()
        assert len(SnapshotStore(home).all()) == 1
        running = [kept for kept in EnvironmentStore(home).readable() if kept.batch]
        assert len(running) == EPOCHS
        assert all(probe.reached == probe.expected for kept in running for probe in kept.probes)
        assert all(kept.probes for kept in running)
        await meetings[2].wait()
        return state

    return solve


def test_three_epochs_start_from_one_and_share_nothing(home: Home, tmp_path: Path) -> None:
    family = tmp_path / "forked"
    family.mkdir()
    (family / "forked.py").write_text(FAMILY)
    configuration = Configuration(family=str(family), task="main", fork="epochs")
    seen: dict[int, dict[str, Any]] = {}
    task = Task(
        dataset=[Sample(input="hello", sandbox=SandboxEnvironmentSpec("provisioner", configuration))],
        solver=compare(home, seen),
    )
    [log] = eval(
        task, model="mockllm/model", epochs=EPOCHS, max_samples=EPOCHS, max_sandboxes=EPOCHS, log_dir=str(tmp_path)
    )
    assert log.status == "success", log.error
    samples = log.samples or []
    assert [sample.error for sample in samples] == [None] * EPOCHS
    assert len({each["word"] for each in seen.values()}) == 1
    boots, keys, drawn = zip(*(_parts(each["own"]) for each in seen.values()), strict=True)
    for each in (boots, keys, drawn):
        assert len(set(each)) == EPOCHS
    began = [beginning(sample) for sample in samples]
    [first] = [each for each in began if each["frozen_as"]]
    assert [each["forked_from"] for each in began if each is not first] == [first["environment"]] * (EPOCHS - 1)
    assert "renewal" not in first["phases"]
    assert all("renewal" in each["phases"] and "start" not in each["phases"] for each in began if each is not first)
    assert [kept for kept in EnvironmentStore(home).readable() if kept.batch] == []
    assert SnapshotStore(home).all() == []
    assert Ledger(home.ledger).entries(unsettled=True) == []


@solver
def visit_each_other(boots: list[str]) -> Solver:
    """Has the two machines of each epoch reach each other by name, while the other epoch's run."""
    meetings: list[Meeting] = []

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        if not meetings:
            meetings.extend((Meeting(2), Meeting(2)))
        await meetings[0].wait()
        for machine, other in (("left", "right"), ("right", "left")):
            await _said(f"timeout 30 bash -c 'exec 3<>/dev/tcp/{other}/22'", machine=machine)
            assert await _said("hostname", machine=machine) == machine
            boots.append(await _said("cat /proc/sys/kernel/random/boot_id", machine=machine))
        await meetings[1].wait()
        return state

    return solve


def test_forked_machines_reach_each_other_by_name(home: Home, tmp_path: Path) -> None:
    configuration = Configuration(machines=(Machine(name="left"), Machine(name="right")), fork="epochs")
    boots: list[str] = []
    task = Task(
        dataset=[Sample(input="hello", sandbox=SandboxEnvironmentSpec("provisioner", configuration))],
        solver=visit_each_other(boots),
    )
    [log] = eval(task, model="mockllm/model", epochs=2, max_samples=2, max_sandboxes=2, log_dir=str(tmp_path))
    assert log.status == "success", log.error
    samples = log.samples or []
    assert [sample.error for sample in samples] == [None, None]
    assert len(set(boots)) == 4
    began = [beginning(sample) for sample in samples]
    [first] = [each for each in began if each["frozen_as"]]
    assert [each["forked_from"] for each in began if each is not first] == [first["environment"]]
    assert SnapshotStore(home).all() == []
    assert_nothing_left(home)


def test_an_eval_killed_while_it_freezes_an_epoch_leaves_nothing(home: Home, tmp_path: Path) -> None:
    process = started(tmp_path, "forks_epochs")

    def is_writing_memory() -> bool:
        """Returns whether the frozen machine's memory is being written; the eval then stands still."""
        os.killpg(process.pid, signal.SIGSTOP)
        written = [path.stat().st_blocks * 512 for path in home.snapshots.glob(f"{UNFINISHED}*/primary/{MEMORY}")]
        if any(size > LEAST_WRITTEN_BYTES for size in written):
            return True
        os.killpg(process.pid, signal.SIGCONT)
        return False

    wait(process, lambda: any(home.snapshots.glob(f"{UNFINISHED}*")) and is_writing_memory())
    os.killpg(process.pid, signal.SIGKILL)
    said(process)
    cleaned = subprocess.run(command("sandbox", "cleanup", "provisioner"), capture_output=True, text=True, check=False)
    assert cleaned.returncode == 0, cleaned.stdout + cleaned.stderr
    assert "unfinished snapshot" in cleaned.stdout
    assert_nothing_left(home, cleaned.stdout)
    assert list(home.snapshots.iterdir()) == []
    assert processes_of(home) == []


def _parts(text: str) -> tuple[str, str, str]:
    lines = text.splitlines()
    return lines[0], "\n".join(lines[1:-1]), lines[-1]
