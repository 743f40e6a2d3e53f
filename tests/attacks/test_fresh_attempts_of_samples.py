"""Attack: under Inspect, an agent whose work went badly makes its machine fail, so that its sample is tried again.

Inspect leaves a sample's error out of the metrics, and tries it again if the operator says so: --retry-on-error,
eval-retry, eval-set. What must hold for task families: what the agent brings about is a score of 0. Only what the cloud
says, or an unknown one, is an error.
"""

from __future__ import annotations

import contextlib
import errno
import json
from collections.abc import Sequence
from typing import Any

import pytest
from inspect_ai.model import ChatMessageAssistant, ChatMessageUser, ModelName, ModelOutput
from inspect_ai.scorer import Score, Target
from inspect_ai.solver import TaskState
from inspect_ai.tool import ToolCall, ToolError
from inspect_ai.util import OutputLimitExceededError, SandboxEnvironment, SandboxUnavailableError, Store
from inspect_ai.util._store import init_subtask_store

from provisioner.base.errors import MachineLostError
from provisioner.base.models import Environment
from provisioner.clouds.cloud import TerminationReason
from provisioner.inspect import scoring
from provisioner.inspect.sandbox import ProvisionerSandbox
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.exec_call import Call
from tests.unit.fakes.guest import SETUP, Fails, Guest
from tests.unit.fakes.world import lock_out
from tests.unit.inspect.conftest import Configured, configured

__all__ = ["configured"]

pytestmark = pytest.mark.anyio

OFF = TerminationReason("QEMU says guest-shutdown", from_within=True)
SPOT = TerminationReason("Server.SpotInstanceTermination")
SUBMIT = ChatMessageAssistant(content="", tool_calls=[ToolCall(id="1", function="submit", arguments={"answer": "42"})])


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens all waiting."""
    monkeypatch.setattr("provisioner.environment.lifecycle.SCORING_PAUSES_SECONDS", (0.0, 0.0))


def _state(messages: Sequence[ChatMessageAssistant] = ()) -> TaskState:
    metadata = {
        "task_family": "fam", "task_name": "main", "expected_score": 0.0,
        "provisioner": {"scoring_visible_to_agent": True},
    }  # fmt: skip
    return TaskState(ModelName("mockllm/model"), "main", 1, "Do it.", [ChatMessageUser(content="Do it."), *messages],
                     output=ModelOutput.from_content("mockllm/model", "said last"), metadata=metadata)  # fmt: skip


@pytest.fixture
async def sandbox(
    cloud: FakeCloud, configured: Configured, monkeypatch: pytest.MonkeyPatch, anyio_backend: str
) -> SandboxEnvironment:
    """The sample's machine, in which the agent has begun."""
    cloud.guest_defaults = {"values": {"setup": {**SETUP, "has_intermediate_score": True}}}
    sandboxes = await ProvisionerSandbox.sample_init("task", configured(), {})
    monkeypatch.setattr(scoring, "sandbox", sandboxes.__getitem__)
    init_subtask_store(Store())

    async def generate(*_: Any, **__: Any) -> TaskState:
        raise AssertionError("the model must not be asked")

    await scoring.begin()(_state(), generate)
    return sandboxes["default"]


@pytest.fixture
def env(sandbox: SandboxEnvironment) -> Environment:
    return sandbox.as_type(ProvisionerSandbox).machines.environment


@pytest.fixture
def guest(cloud: FakeCloud, env: Environment) -> Guest:
    return cloud.machine(env).guest


async def _scored(*messages: ChatMessageAssistant) -> Score:
    score = await scoring.score_metr_task()(_state(messages), Target(""))
    assert score is not None
    return score


def _is_the_agents(score: Score) -> bool:
    return (score.value, score.metadata) == (0.0, {"agent_failed": True})


@pytest.mark.parametrize("messages", [(SUBMIT,), ()], ids=["submitted", "without submit"])
async def test_an_agent_that_switches_its_machine_off_has_a_score_of_0(
    cloud: FakeCloud, env: Environment, messages: Sequence[ChatMessageAssistant]
) -> None:
    cloud.ending = OFF
    cloud.end_machine(env)
    score = await _scored(*messages)
    assert _is_the_agents(score)
    assert OFF.message in str(score.explanation)


async def test_an_agent_that_locks_the_controller_out_scores_0(cloud: FakeCloud, env: Environment) -> None:
    lock_out(cloud.machine(env).sshd)
    assert _is_the_agents(await _scored(SUBMIT))


@pytest.mark.parametrize("reason", [SPOT, TerminationReason()], ids=["spot", "unknown"])
async def test_a_machine_that_ends_otherwise_is_an_error(
    cloud: FakeCloud, env: Environment, reason: TerminationReason
) -> None:
    cloud.ending = reason
    cloud.end_machine(env)
    with pytest.raises(MachineLostError) as raised:
        await _scored(SUBMIT)
    assert reason.message in str(raised.value)


def _kill(guest: Guest, monkeypatch: pytest.MonkeyPatch, operation: str, *, helper: bool = False) -> None:
    """Has the kernel kill an operation, or the helper itself, which then writes no result."""
    help_with, run = guest._help, guest._as_root

    def killed(request: dict[str, Any]) -> tuple[bytes, bytes]:
        said = help_with(request)
        if request["operation"] == operation:
            error = {"status": "error", "kind": "exit", "message": "", "exit_code": -9}
            guest._results[request["result"]] = json.dumps(error)
        return said

    def without_result(call: Call, stdin: bytes) -> tuple[int, bytes, bytes]:
        if call.request["operation"] == "read" and call.request["path"] not in guest._results:
            return errno.ENOENT, b"", b""
        code, stdout, stderr = run(call, stdin)
        request = json.loads(stdin) if call.argv[0] == "helper.py" else {}
        if request.get("operation") == operation:
            del guest._results[request["result"]]
            code = 137
        return code, stdout, stderr

    monkeypatch.setattr(guest, "_help", guest._help if helper else killed)
    monkeypatch.setattr(guest, "_as_root", without_result if helper else guest._as_root)


@pytest.mark.parametrize("helper", [False, True], ids=["score", "helper"])
async def test_scoring_killed_for_memory_is_a_score_of_0(
    guest: Guest, monkeypatch: pytest.MonkeyPatch, helper: bool
) -> None:
    _kill(guest, monkeypatch, "score", helper=helper)
    assert _is_the_agents(await _scored(SUBMIT))


async def test_a_killed_last_intermediate_score_is_a_score_of_0(
    sandbox: SandboxEnvironment, env: Environment, guest: Guest, monkeypatch: pytest.MonkeyPatch
) -> None:
    environments = sandbox.as_type(ProvisionerSandbox).machines.session.environments
    environments.update(environments.reread(env), has_aggregate_scores=True)
    _kill(guest, monkeypatch, "intermediate_score")
    assert _is_the_agents(await _scored(SUBMIT))


async def test_a_submission_whose_reading_is_killed_is_a_score_of_0(
    guest: Guest, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def submission(_: TaskState) -> None:
        """There is a file."""

    monkeypatch.setattr(scoring, "_submission", submission)
    _kill(guest, monkeypatch, "read_submission")
    assert _is_the_agents(await _scored())


@pytest.mark.parametrize("answer", ["\ud800", ["\udfff"], {"a": 1}], ids=["half a character", "list", "mapping"])
async def test_a_submission_that_is_no_text_is_scored(guest: Guest, answer: object) -> None:
    call = ToolCall(id="1", function="submit", arguments={"answer": answer})
    score = await _scored(ChatMessageAssistant(content="", tool_calls=[call]))
    assert score.value == 0.5
    assert guest.request("score")


@pytest.mark.parametrize("has_score", [True, False], ids=["score", "aggregate_scores"])
async def test_an_agent_that_fills_its_score_log_is_scored(
    sandbox: SandboxEnvironment, env: Environment, guest: Guest, monkeypatch: pytest.MonkeyPatch, has_score: bool
) -> None:
    environments = sandbox.as_type(ProvisionerSandbox).machines.session.environments
    environments.update(environments.reread(env), has_score=has_score, has_aggregate_scores=not has_score)
    guest.values["intermediate_score"] = {"score": 0.25, "message": {"seen": "x" * 1000}}
    monkeypatch.setattr("provisioner.environment.operations.SCORE_LOG_BYTES", 3000)
    await scoring.score()()
    with contextlib.suppress(ToolError):
        while True:
            await scoring.score()()
    with pytest.raises(ToolError):
        await scoring.score()()
    score = await _scored(SUBMIT)
    assert score.value == (0.5 if has_score else 0.75)


async def test_an_agent_that_floods_the_search_is_scored(
    sandbox: SandboxEnvironment, guest: Guest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has become root, and put another program in the place of /usr/bin/test."""

    class Flooded:
        def as_type(self, kind: type[ProvisionerSandbox]) -> ProvisionerSandbox:
            return sandbox.as_type(kind)

        async def exec(self, *_: Any, **__: Any) -> None:
            raise OutputLimitExceededError("10 MiB", "yyy")

    monkeypatch.setattr(scoring, "sandbox", lambda _: Flooded())
    score = await _scored()
    assert (score.value, score.answer) == (0.5, "said last")


async def test_a_submission_that_cannot_be_read_is_a_score_of_0(guest: Guest, monkeypatch: pytest.MonkeyPatch) -> None:
    async def submission(_: TaskState) -> None:
        """There is a file."""

    monkeypatch.setattr(scoring, "_submission", submission)
    guest.values["read_submission"] = {"found": True}
    score = await _scored()
    assert _is_the_agents(score)
    assert "cannot be read" in str(score.explanation)


async def test_a_replay_of_a_failed_agent_is_never_right(cloud: FakeCloud, env: Environment) -> None:
    cloud.ending = OFF
    cloud.end_machine(env)
    score = await scoring.check_expected_score()(_state([SUBMIT]), Target(""))
    assert score is not None
    assert (score.value, (score.metadata or {})["agent_failed"]) == (0.0, True)


async def test_an_agent_that_breaks_early_scoring_only_hears_so(
    cloud: FakeCloud, env: Environment, guest: Guest
) -> None:
    guest.values["intermediate_score"] = Fails("the answer is 42")
    with pytest.raises(ToolError) as raised:
        await scoring.score()()
    assert "42" not in str(raised.value)
    cloud.end_machine(env)
    with pytest.raises(SandboxUnavailableError):
        await scoring.score()()


async def test_an_evals_own_solver_needs_no_step_of_ours(
    cloud: FakeCloud, configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing has recorded that the agent began: scoring does."""
    sandboxes = await ProvisionerSandbox.sample_init("task", configured(), {})
    monkeypatch.setattr(scoring, "sandbox", sandboxes.__getitem__)
    init_subtask_store(Store())
    cloud.ending = OFF
    cloud.end_machine(sandboxes["default"].as_type(ProvisionerSandbox).machines.environment)
    assert _is_the_agents(await _scored(SUBMIT))


async def test_the_error_of_a_call_says_what_the_cloud_says(
    cloud: FakeCloud, env: Environment, sandbox: SandboxEnvironment
) -> None:
    cloud.ending = SPOT
    cloud.end_machine(env)
    with pytest.raises(SandboxUnavailableError, match=SPOT.message):
        await sandbox.exec(["true"])
