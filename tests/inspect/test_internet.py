"""Shows which samples reach the internet: with `internet: full`, with a destination in `allow`, and with neither."""

from __future__ import annotations

from pathlib import Path

import pytest
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.util import SandboxEnvironmentSpec, sandbox

from provisioner.inspect.configuration import Configuration
from provisioner.inspect.sandbox import ProvisionerSandbox
from provisioner.store.environments import EnvironmentStore
from provisioner.store.home import Home
from tests.local.test_isolation import host_address, listening

FETCH = "import urllib.request as u; print(u.urlopen('http://deb.debian.org/', timeout=20).status)"
TALK = 'exec 3<>"/dev/tcp/$0/$1"; echo hello >&3; head -c7 <&3'
# What each sample gets of the internet, and of the allowed destination.
EXPECTED = {"full": ("200", ""), "allow": ("", "welcome"), "none": ("", "")}

pytestmark = [
    pytest.mark.vm,
    pytest.mark.timeout(1800),
    pytest.mark.xdist_group("tools"),
    pytest.mark.filterwarnings("default"),  # Inspect's own deprecations
]


@solver
def look_out(address: str, port: int, found: dict[str, tuple[str, str]]) -> Solver:
    """Tries to reach the internet, and a destination of the controller's."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        fetched = await sandbox().exec(["timeout", "30", "python3", "-c", FETCH])
        talked = await sandbox().exec(["timeout", "10", "bash", "-c", TALK, address, str(port)])
        found[str(state.sample_id)] = (fetched.stdout.strip(), talked.stdout)
        environment = sandbox().as_type(ProvisionerSandbox).machines.environment
        assert all(probe.reached == probe.expected for probe in environment.probes)
        return state

    return solve


def test_samples_reach_what_their_configuration_allows(home: Home, tmp_path: Path) -> None:
    found: dict[str, tuple[str, str]] = {}
    address = host_address()
    with listening(address) as (port, visitors):
        configurations = {
            "full": Configuration(internet="full"),
            "allow": Configuration(allow=(f"{address}:{port}",)),
            "none": Configuration(),
        }
        samples = [
            Sample(id=name, input="x", sandbox=SandboxEnvironmentSpec("provisioner", configuration))
            for name, configuration in configurations.items()
        ]
        task = Task(dataset=samples, solver=look_out(address, port, found))
        [log] = eval(task, model="mockllm/model", log_dir=str(tmp_path), display="none")
    assert log.status == "success", log.error
    assert found == EXPECTED
    assert b"hello\n" in visitors
    assert [kept for kept in EnvironmentStore(home).readable() if kept.batch] == []
