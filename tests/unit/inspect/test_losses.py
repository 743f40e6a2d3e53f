"""Tests that a lost machine ends its sample as an error that says why, in evals on a fake cloud with a mock model."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalSample
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import Score, Scorer, Target, accuracy, scorer
from inspect_ai.solver import Generate, Solver, TaskState, generate, solver, use_tools
from inspect_ai.tool import Tool, bash
from inspect_ai.util import SandboxEnvironmentSpec, SandboxUnavailableError, sandbox

from provisioner.base.clock import now
from provisioner.base.errors import (
    CommandTimeoutError,
    HostError,
    MachineLostError,
    ProvisionerError,
    TaskError,
    ThrottledError,
)
from provisioner.clouds.cloud import TerminationReason
from provisioner.inspect import scoring
from provisioner.inspect.configuration import Configuration, Machine
from provisioner.inspect.failures import LossError
from provisioner.inspect.sandbox import ProvisionerSandbox
from provisioner.inspect.scoring import score_metr_task
from provisioner.machines.connect import connect
from tests.inspect.scripted import says
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.guest import SETUP
from tests.unit.fakes.world import lock_out
from tests.unit.inspect.conftest import Configured

SPOT = TerminationReason("Server.SpotInstanceTermination")
OFF = TerminationReason("QEMU says guest-shutdown", from_within=True)
PLAIN = Configuration()
THROTTLED = ThrottledError("too many requests")
BOTH = pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"], indirect=True)


@pytest.fixture
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(getattr(request, "param", "asyncio"))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, cloud: FakeCloud, configured: Configured, anyio_backend: str) -> None:
    """Has Inspect run on the event loop, without its pause of up to a second before each sample."""
    cloud.guest_defaults["programs"] = dict.fromkeys(("/bin/sh", "bash", "true"), b"")
    monkeypatch.setenv("INSPECT_ASYNC_BACKEND", anyio_backend)
    monkeypatch.setattr(ProvisionerSandbox, "default_concurrency", classmethod(lambda _: None))
    monkeypatch.setattr("provisioner.environment.lifecycle.SCORING_PAUSES_SECONDS", (0.0, 0.0))


def _lost(cloud: FakeCloud, role: str = "primary") -> None:
    cloud.end_machine(sandbox().as_type(ProvisionerSandbox).machines.environment, role)


@solver
def lose(cloud: FakeCloud, role: str = "primary") -> Solver:
    """Loses a machine of the sample, which no call has noticed yet."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        _lost(cloud, role)
        return state

    return solve


@solver
def swallow() -> Solver:
    """Works in the machine, and takes its loss for nothing."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        with contextlib.suppress(SandboxUnavailableError):
            await sandbox().exec(["true"])
        return state

    return solve


@scorer(metrics=[accuracy()])
def content() -> Scorer:
    """Is content with everything."""

    async def score(state: TaskState, target: Target) -> Score:
        return Score(value=1)

    return score


@scorer(metrics=[accuracy()])
def looks(cloud: FakeCloud) -> Scorer:
    """Loses the machine, and looks into it."""

    async def score(state: TaskState, target: Target) -> Score:
        _lost(cloud)
        return Score(value=int((await sandbox().exec(["true"])).success))

    return score


def _ended(
    tmp_path: Path, configuration: Configuration, plan: Sequence[Solver], judge: Scorer, call: ModelOutput
) -> EvalSample:
    """Returns how the sample of an eval ended, whose model makes one call and is done."""
    spec = SandboxEnvironmentSpec("provisioner", configuration)
    metadata = {"task_family": "fam", "task_name": "main", "provisioner": {"scoring_visible_to_agent": True}}
    done = ModelOutput.from_content("mockllm/model", "done")
    done.usage = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)
    model = get_model("mockllm/model", custom_outputs=[call, done])
    task = Task(dataset=[Sample(input="x", metadata=metadata)], solver=list(plan), scorer=judge, sandbox=spec)
    [log] = eval(task, model=model, log_dir=str(tmp_path / "logs"), display="none")
    [sample] = log.samples or []
    return sample


def _is_an_error_that_says(reason: str, sample: EvalSample) -> None:
    assert sample.error is not None
    assert reason in sample.error.message
    assert sample.error.message.startswith("SandboxUnavailableError(")
    assert not sample.scores


def _bash(cloud: FakeCloud, role: str = "primary") -> list[Solver]:
    return [lose(cloud, role), use_tools(bash(timeout=100)), generate()]


@BOTH
def test_a_loss_that_only_a_tool_has_seen_ends_the_sample(cloud: FakeCloud, tmp_path: Path) -> None:
    cloud.ending = SPOT
    sample = _ended(tmp_path, PLAIN, _bash(cloud), content(), says("bash", command="true"))
    _is_an_error_that_says(SPOT.message, sample)


@pytest.mark.parametrize("seen_by", ["a solver that takes it for nothing", "the eval's own scorer"])
def test_a_loss_ends_the_sample_whatever_the_eval_makes_of_it(cloud: FakeCloud, tmp_path: Path, seen_by: str) -> None:
    cloud.ending = SPOT
    plan, judge = ([lose(cloud), swallow()], content()) if "solver" in seen_by else ([], looks(cloud))
    sample = _ended(tmp_path, PLAIN, plan, judge, says("bash", command="true"))
    _is_an_error_that_says(SPOT.message, sample)


def test_a_loss_that_the_cloud_confirms_ends_a_familys_sample(
    cloud: FakeCloud, configured: Configured, tmp_path: Path
) -> None:
    cloud.ending = SPOT
    sample = _ended(tmp_path, configured(), _bash(cloud), score_metr_task(), says("bash", command="true"))
    _is_an_error_that_says(SPOT.message, sample)


def test_an_agent_that_powers_its_family_off_scores_0(cloud: FakeCloud, configured: Configured, tmp_path: Path) -> None:
    cloud.ending = OFF
    sample = _ended(tmp_path, configured(), _bash(cloud), score_metr_task(), says("bash", command="true"))
    assert sample.error is None
    assert sample.scores is not None
    score = sample.scores["score_metr_task"]
    assert (score.value, score.metadata) == (0.0, {"agent_failed": True})


@pytest.mark.parametrize(("reason", "ends"), [(SPOT, True), (OFF, False)], ids=["spot", "agent"])
def test_the_scoring_tool_ends_a_lost_machines_sample(
    cloud: FakeCloud, configured: Configured, tmp_path: Path, reason: TerminationReason, ends: bool
) -> None:
    cloud.guest_defaults["values"] = {"setup": {**SETUP, "has_intermediate_score": True}}
    cloud.ending = reason
    tool: Tool = scoring.score()
    plan = [lose(cloud), use_tools(tool), generate()]
    sample = _ended(tmp_path, configured(), plan, content(), says("score"))
    told = [message.error.message for message in sample.messages if message.role == "tool" and message.error]
    assert told == ["The machine does not answer."] or ends
    if ends:
        _is_an_error_that_says(reason.message, sample)
    else:
        assert sample.error is None


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("error", "is_agents_doing"),
    [(MachineLostError("gone"), True), (TaskError("lies"), True), (HostError("full"), False), (THROTTLED, False)],
    ids=["machine", "answer", "host", "cloud"],
)
async def test_only_what_a_machine_does_is_an_agents_doing(
    configured: Configured, error: ProvisionerError, is_agents_doing: bool
) -> None:
    sandboxes = await ProvisionerSandbox.sample_init("task", configured(), {})
    machines = sandboxes["default"].as_type(ProvisionerSandbox).machines
    # The operator has extended its time to live since this process read its record.
    machines._environment = machines.environment.model_copy(update={"expires_at": now() - timedelta(hours=1)})

    def fail(_: object) -> None:
        raise error

    with pytest.raises(LossError) as raised:
        machines.on("primary", fail)
    assert raised.value.is_agents_doing == is_agents_doing
    await ProvisionerSandbox.sample_cleanup("task", None, sandboxes, False)


def test_a_score_says_that_the_agent_had_no_machine(cloud: FakeCloud, configured: Configured, tmp_path: Path) -> None:
    @solver
    def interrupted() -> Solver:
        async def solve(state: TaskState, generate: Generate) -> TaskState:
            machines = sandbox().as_type(ProvisionerSandbox).machines
            sshd = cloud.machine(machines.environment).sshd
            authorize = sshd.authorize
            lock_out(sshd)
            with contextlib.suppress(SandboxUnavailableError):
                await sandbox().exec(["true"])
            sshd.authorize = authorize
            return state

        return solve

    sample = _ended(tmp_path, configured(), [interrupted()], score_metr_task(), says("submit"))
    assert sample.error is None
    assert sample.scores is not None
    score = sample.scores["score_metr_task"]
    assert score.value == 0.5
    assert "no machine from some time on: " in str((score.metadata or {})["warnings"])


@pytest.mark.anyio
async def test_a_lost_machine_stays_lost_and_the_other_works(cloud: FakeCloud) -> None:
    given = Configuration(machines=(Machine(name="a"), Machine(name="b")))
    sandboxes = await ProvisionerSandbox.sample_init("task", given, {})
    machines = sandboxes["a"].as_type(ProvisionerSandbox).machines
    sshd = cloud.machine(machines.environment).sshd
    authorize = sshd.authorize
    lock_out(sshd)
    cloud.consoles["primary"] = "[  7.0] Out of memory: Killed process 812 (java) total-vm:9kB\n"
    with pytest.raises(SandboxUnavailableError, match=r"Killed process 812 \(java\).* raise `memory_gb`") as first:
        await sandboxes["a"].exec(["true"])
    sshd.authorize = authorize
    with connect(machines.session, machines.environment, "primary") as connection:
        assert connection.active
    for call in (sandboxes["a"].exec(["true"]), sandboxes["a"].read_file("/f"), sandboxes["a"].write_file("/f", "")):
        with pytest.raises(SandboxUnavailableError) as later:
            await call
        assert str(later.value) == str(first.value)
    assert (await sandboxes["b"].exec(["true"])).success
    await ProvisionerSandbox.sample_cleanup("task", None, sandboxes, False)


@pytest.mark.anyio
async def test_an_error_says_what_its_own_machine_ended_lately(
    cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = Configuration(machines=(Machine(name="a"), Machine(name="b")))
    sandboxes = await ProvisionerSandbox.sample_init("task", given, {})
    machines = sandboxes["a"].as_type(ProvisionerSandbox).machines
    one, other = machines.environment.roles
    for role, task in ((one, "java"), (other, "tail")):
        kill = f"6,3,1,-;oom-kill:constraint=CONSTRAINT_NONE,task_memcg=/x,task={task},pid=8,uid=0"
        cloud.machine(machines.environment, role).guest.memory = [[kill], "", {}]
        machines.on(role, partial(machines.look_for_shortage, role))

    def fail(error: ProvisionerError, _: object) -> NoReturn:
        raise error

    with pytest.raises(CommandTimeoutError) as late:
        machines.on(one, partial(fail, CommandTimeoutError("late")))
    assert late.value.message == "late"
    with pytest.raises(LossError, match=r"gone.* The kernel ended java") as lost:
        machines.on(one, partial(fail, MachineLostError("gone")))
    assert "tail" not in lost.value.message
    monkeypatch.setattr("provisioner.inspect.sample.BEFORE_LOSS_SECONDS", 0.0)
    with pytest.raises(LossError) as lost:
        machines.on(other, partial(fail, MachineLostError("gone")))
    assert "tail" not in lost.value.message
    await ProvisionerSandbox.sample_cleanup("task", None, sandboxes, False)
