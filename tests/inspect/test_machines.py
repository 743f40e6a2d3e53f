"""Shows that a sample's machines, however many, are one private network, in which each reaches every other by name."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from inspect_ai import Task, eval, task_with
from inspect_ai.model import ChatMessageTool, get_model
from inspect_ai.solver import Generate, Solver, TaskState, chain, solver
from inspect_ai.util import sandbox

from provisioner.costs.ledger import Ledger
from provisioner.store.environments import EnvironmentStore
from provisioner.store.home import Home
from tests.inspect.scripted import says

EXAMPLE = Path(__file__).parents[2] / "examples" / "inspect" / "four_machines.py"
NAMES = ("box", "web", "archive", "vault")
KNOCK = 'hostname; for name in {names}; do timeout 30 bash -c "exec 3<>/dev/tcp/$name/22" && echo $name; done'
# What an agent would do, in one command.
HOPS = """
get() { python3 -c 'import sys, urllib.request as r; print(r.urlopen(sys.argv[1], timeout=30).read().decode())' "$1"; }
path=$(get http://web/ | grep -o 'http://archive/[a-z0-9/.]*')
door=$(get "$path" | grep -o '[a-z]*-[a-z]*$')
get "http://vault/$door/word.txt"
"""

pytestmark = [
    pytest.mark.vm,
    pytest.mark.timeout(1800),
    pytest.mark.xdist_group("checks"),
    pytest.mark.filterwarnings("default"),  # Inspect's own deprecations
]


@solver
def knock(home: Home) -> Solver:
    """Has each machine knock at every machine's door, by name."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        for name in NAMES:
            done = await sandbox(name).exec(["bash", "-c", KNOCK.format(names=" ".join(NAMES))])
            assert done.stdout.split() == [name, *NAMES], done
        [environment] = [kept for kept in EnvironmentStore(home).readable() if kept.batch]
        assert environment.label == "four_machines 1 (epoch 1)"
        assert [environment.hostname(role) for role in environment.roles] == ["box", "archive", "vault", "web"]
        assert all(probe.reached == probe.expected for probe in environment.probes)
        assert {probe.machine for probe in environment.probes} == {"primary", *NAMES[1:]}
        return state

    return solve


def test_four_machines_reach_each_other_by_name(home: Home, tmp_path: Path) -> None:
    task: Task = runpy.run_path(str(EXAMPLE))["four_machines"]()
    assert task.solver is not None
    outputs = [says("bash", command=HOPS), says("submit", answer="cormorant")]
    model = get_model("mockllm/model", custom_outputs=outputs)
    [log] = eval(task_with(task, solver=chain(knock(home), task.solver)), model=model, log_dir=str(tmp_path))
    assert log.status == "success", log.error
    [sample] = log.samples or []
    said = [message.text for message in sample.messages if isinstance(message, ChatMessageTool)]
    assert "The word is cormorant." in said[0]
    assert sample.scores is not None
    assert sample.scores["includes"].value == "C"
    assert [kept for kept in EnvironmentStore(home).readable() if kept.batch] == []
    assert Ledger(home.ledger).entries(unsettled=True) == []
