"""Runs Inspect's own checks of a sandbox on real machines: as root's and as another default user, asyncio and trio."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache, partial
from itertools import product
from typing import Any

import anyio
import pytest
from inspect_ai.util import SandboxEnvironment

from provisioner.inspect.configuration import Configuration, Machine
from provisioner.inspect.sandbox import ProvisionerSandbox
from provisioner.store.home import Home
from tests.inspect.checks import ADDS_A_USER, CHECKS, run_check

# Machines by the names of their default users.
USERS = ("root", "agent")
PAIRS = list(product(("asyncio", "trio"), USERS))
CHECKS_OF_0_3_285 = 44
# They take a right from the file's owner, and expect that the default user lacks it then. Root lacks none.
NOT_FOR_ROOT = {
    "test_read_file_not_allowed",
    "test_write_text_file_without_permissions",
    "test_write_binary_file_without_permissions",
}
# A sample of them, which scripts/test runs: of each kind but those with a time limit, which a busy host may not keep.
STORY = {
    "test_cwd_relative",
    "test_exec_env_vars",
    "test_exec_input_binary",
    "test_exec_output_utf",
    "test_exec_returncode",
    "test_read_and_write_file_binary",
    "test_read_file_limit",
    "test_read_file_not_allowed",
    "test_write_file_text_utf",
}

pytestmark = [
    pytest.mark.vm,
    pytest.mark.timeout(1800),
    pytest.mark.xdist_group("checks"),
]


@pytest.fixture(scope="module")
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """The event loop that the checks run on."""
    return str(request.param)


@pytest.fixture(scope="module")
def sandboxes(home: Home) -> Iterator[Callable[[str], SandboxEnvironment]]:
    """Brings up the machine of a default user when its first check asks for it; it serves both event loops."""
    begun: set[str] = set()
    with ExitStack() as ends:

        @cache
        def sandbox_of(user: str) -> SandboxEnvironment:
            assert user not in begun, "its machine did not come up for an earlier check"
            begun.add(user)
            configuration = Configuration(machines=(Machine(name=user, user=user),))
            anyio.run(ProvisionerSandbox.task_init, "self_check", configuration)
            found = anyio.run(ProvisionerSandbox.sample_init, "self_check", configuration, {})
            end = partial(ProvisionerSandbox.sample_cleanup, "self_check", configuration, found, interrupted=False)
            ends.callback(anyio.run, end)
            return found[user]

        yield sandbox_of


@pytest.fixture
def sandbox(sandboxes: Callable[[str], SandboxEnvironment], user: str) -> SandboxEnvironment:
    """The machine of the check's default user. Not async: bringing a machine up has an event loop of its own."""
    return sandboxes(user)


def test_there_are_as_many_checks_as_were_counted() -> None:
    assert len(CHECKS) >= CHECKS_OF_0_3_285


def case(loop: str, user: str, check: str) -> Any:
    """Returns a check's parameters, marked if no sandbox with that default user passes it."""
    fails = pytest.mark.xfail(reason="root may read and write everything", strict=True)
    return pytest.param(loop, user, check, marks=[fails] if user == "root" and check in NOT_FOR_ROOT else [])


def story(loop: str, user: str, check: str) -> Any:
    """Returns a check's parameters, marked if scripts/test runs it."""
    if (loop, user) == ("asyncio", "agent") and check in STORY:
        return pytest.param(loop, user, check, marks=pytest.mark.story)
    return case(loop, user, check)


@pytest.mark.story
def test_all_checks_that_are_named_here_exist() -> None:
    assert (NOT_FOR_ROOT | STORY | {ADDS_A_USER}).issubset(CHECKS)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("anyio_backend", "user", "check"),
    [story(*pair, check) for pair, check in product(PAIRS, CHECKS)],
    indirect=["anyio_backend"],
)
async def test_inspects_check_passes(sandbox: SandboxEnvironment, check: str) -> None:
    await run_check(sandbox, check)
