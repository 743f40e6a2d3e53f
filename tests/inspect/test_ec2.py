"""Runs Inspect's own checks on EC2, in a sample of three machines that reach each other by name.

Each check runs once, the next one on another event loop or as another user; with PROVISIONER_TEST_CHECKS=all each runs
in all of test_self_check's combinations.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from itertools import cycle, product

import anyio
import pytest
from inspect_ai.util import SandboxEnvironment

from provisioner.inspect.configuration import Configuration, Machine
from provisioner.inspect.sandbox import ProvisionerSandbox
from provisioner.store.environments import EnvironmentStore
from provisioner.store.home import Home
from tests.inspect.checks import CHECKS, run_check
from tests.inspect.test_self_check import PAIRS, case

# The default users of machines by their names; the first machine is the eval's default.
MACHINES = {"default": "root", "db": "agent", "web": "root"}
BY_USER = {"root": "default", "agent": "db"}
EVERY_PAIR = os.environ.get("PROVISIONER_TEST_CHECKS") == "all"
CASES = [case(*pair, check) for pair, check in (product(PAIRS, CHECKS) if EVERY_PAIR else zip(cycle(PAIRS), CHECKS))]

pytestmark = [pytest.mark.vm, pytest.mark.timeout(2400), pytest.mark.ec2]


@pytest.fixture(scope="module")
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """The event loop that the checks run on."""
    return str(request.param)


@pytest.fixture(scope="module")
def home(ec2_home: Home) -> Iterator[Home]:
    """The home of the sample."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROVISIONER_HOME", str(ec2_home.root))
        yield ec2_home


@pytest.fixture(scope="module")
def machines(home: Home) -> Iterator[dict[str, SandboxEnvironment]]:
    """The machines of a sample, as Inspect gets them. They serve both event loops, one after the other."""
    plain = tuple(Machine(name=name, user=user) for name, user in MACHINES.items())
    configuration = Configuration(cloud="aws", machines=plain)
    anyio.run(ProvisionerSandbox.task_init, "ec2", configuration)
    found = anyio.run(ProvisionerSandbox.sample_init, "ec2", configuration, {})
    try:
        yield found
    finally:
        anyio.run(partial(ProvisionerSandbox.sample_cleanup, "ec2", configuration, found, interrupted=False))
        assert [kept for kept in EnvironmentStore(home).readable() if kept.batch] == []


@pytest.mark.anyio
@pytest.mark.parametrize(("anyio_backend", "user", "check"), CASES, indirect=["anyio_backend"])
async def test_inspects_check_passes_on_ec2(machines: dict[str, SandboxEnvironment], user: str, check: str) -> None:
    await run_check(machines[BY_USER[user]], check)


def test_each_machine_reaches_every_other_by_name(machines: dict[str, SandboxEnvironment]) -> None:
    command = 'hostname; for name in "$@"; do timeout 30 bash -c "exec 3<>/dev/tcp/$name/22" && echo $name; done'
    for name, machine in machines.items():
        done = anyio.run(machine.exec, ["bash", "-c", command, "bash", *MACHINES])
        assert done.stdout.split() == [name, *MACHINES], done
