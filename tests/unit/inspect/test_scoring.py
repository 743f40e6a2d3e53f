"""Tests how a task family's score becomes Inspect's, and which submission is scored."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from inspect_ai.model import ChatMessage, ChatMessageAssistant, ChatMessageUser, ModelName, ModelOutput
from inspect_ai.scorer import Target
from inspect_ai.solver import TaskState
from inspect_ai.tool import ToolCall
from inspect_ai.util import ExecResult, SandboxEnvironment, Store, store_as
from inspect_ai.util._store import init_subtask_store

from provisioner.base.errors import TaskError
from provisioner.environment.operations import SUBMISSION
from provisioner.family.scores import ScoreResult, classify_score
from provisioner.inspect import scoring
from provisioner.inspect.sandbox import ProvisionerSandbox
from provisioner.inspect.scoring import TaskDriverStore, as_score, check_expected_score, score_metr_task
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.guest import SETUP, Fails
from tests.unit.inspect.conftest import Configured

pytestmark = pytest.mark.anyio


def _submit(number: int, **arguments: str) -> ChatMessageAssistant:
    call = ToolCall(id=str(number), function="submit", arguments=arguments)
    return ChatMessageAssistant(content="", tool_calls=[call])


def _state(messages: Sequence[ChatMessage] = (), completion: str = "said last", **metadata: Any) -> TaskState:
    output = ModelOutput.from_content("mockllm/model", completion)
    model = ModelName("mockllm/model")
    return TaskState(model, "main", 1, "Do it.", [ChatMessageUser(content="Do it."), *messages], output=output,
                     metadata=metadata)  # fmt: skip


class Default:
    """The sandbox `default`, which only says whether there is a submission file."""

    def __init__(self, has_file: bool) -> None:
        self._has_file = has_file

    async def exec(self, cmd: list[str], *, user: str, timeout: int) -> ExecResult[str]:
        assert (cmd, user) == (["/usr/bin/test", "-e", SUBMISSION], "root")
        assert timeout == scoring.FILE_SECONDS
        return ExecResult(self._has_file, int(not self._has_file), "", "")


@pytest.mark.parametrize(
    ("messages", "has_file", "scored"),
    [
        ([_submit(1, answer="first"), _submit(2, answer="last")], True, "last"),
        ([_submit(1, answer="it"), ChatMessageAssistant(content="more")], False, "it"),
        ([_submit(1)], True, ""),
        ([ChatMessageAssistant(content="no call")], True, None),
        ([], False, "said last"),
    ],
    ids=["last call", "then words", "without answer", "file", "completion"],
)
async def test_the_last_call_of_submit_comes_before_the_file(
    messages: list[ChatMessage], has_file: bool, scored: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "sandbox", lambda name: {"default": Default(has_file)}[name])
    assert await scoring._submission(_state(messages)) == scored


@pytest.mark.parametrize(
    ("outcome", "nan_is_zero", "value", "metadata"),
    [
        (classify_score({"status": "ok", "value": 0.25}), True, 0.25, None),
        (classify_score({"status": "ok", "value": math.nan}), True, 0.0, None),
        (classify_score({"status": "ok", "value": math.nan}), False, math.nan, None),
        (classify_score({"status": "ok", "value": None}), True, math.nan, {"manual-scoring": True}),
        (classify_score(None), False, 0.0, {"agent_failed": True}),
    ],
    ids=["score", "NaN is 0", "NaN", "manual", "killed"],
)
async def test_a_score_has_metrs_names(
    outcome: ScoreResult, nan_is_zero: bool, value: float, metadata: dict[str, Any] | None
) -> None:
    score = as_score("fam/main", outcome, "42", nan_is_zero)
    assert score.as_float() == pytest.approx(value, nan_ok=True)
    assert (score.answer, score.metadata) == ("42", metadata)
    assert score.explanation == {"scored": None, "manual_scoring_required": "A person has to score it."}.get(
        outcome.kind, outcome.message
    )
    assert score.explanation != ""


@pytest.mark.parametrize("kind", ["exception", "exit", "timeout", "malformed", "infinite", "not_a_number"])
async def test_a_failure_of_scoring_is_never_a_score(kind: Any) -> None:
    failed = ScoreResult(kind=kind, message="it broke", details="a traceback")
    with pytest.raises(TaskError, match="fam/main: it broke") as raised:
        as_score("fam/main", failed, "42", nan_is_zero=True)
    assert raised.value.details == "a traceback"


@pytest.fixture
async def sandboxes(
    cloud: FakeCloud, configured: Configured, monkeypatch: pytest.MonkeyPatch, anyio_backend: str
) -> dict[str, SandboxEnvironment]:
    """The machines of a sample of the fake cloud, and a store of its own."""
    cloud.guest_defaults = {"values": {"setup": SETUP}}
    sandboxes = await ProvisionerSandbox.sample_init("task", configured(), {})
    monkeypatch.setattr(scoring, "sandbox", sandboxes.__getitem__)
    return sandboxes


async def test_what_the_family_raises_is_raised_with_its_task(
    cloud: FakeCloud, sandboxes: dict[str, SandboxEnvironment]
) -> None:
    init_subtask_store(Store())
    environment = sandboxes["default"].as_type(ProvisionerSandbox).machines.environment
    cloud.machine(environment).guest.values["score"] = Fails("no answer key")
    with pytest.raises(TaskError, match=r"fam/main: .*no answer key"):
        await score_metr_task()(_state([_submit(1, answer="42")]), Target(""))
    assert store_as(TaskDriverStore).intermediate_scores == []


async def test_a_family_that_ignores_submissions_gets_none(
    cloud: FakeCloud, configured: Configured, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    setup = {**SETUP, "has_score": False, "has_intermediate_score": True, "has_aggregate_scores": True}
    cloud.guest_defaults = {"values": {"setup": setup}}
    sandboxes = await ProvisionerSandbox.sample_init("task", configured(), {})
    monkeypatch.setattr(scoring, "sandbox", sandboxes.__getitem__)
    init_subtask_store(Store())
    score = await score_metr_task()(_state([_submit(1, answer="42")]), Target(""))
    assert score is not None
    assert (score.as_float(), score.answer) == (0.75, "42")
    assert "submission" not in caplog.text


async def test_a_score_has_the_warnings_of_its_task(
    cloud: FakeCloud, configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = {"main": {"warnings": ["It differs."]}}
    cloud.guest_defaults = {"values": {"setup": {**SETUP, "tasks": tasks}}}
    sandboxes = await ProvisionerSandbox.sample_init("task", configured(), {})
    monkeypatch.setattr(scoring, "sandbox", sandboxes.__getitem__)
    init_subtask_store(Store())
    state = _state([_submit(1, answer="42")], expected_score=0.5)
    for scorer, more in ((score_metr_task(), {}), (check_expected_score(), {"replay": 0.5, "expected": 0.5})):
        score = await scorer(state, Target(""))
        assert score is not None
        assert score.metadata == {**more, "warnings": ["It differs."]}


async def test_a_replay_is_right_if_the_score_is_the_expected_one(sandboxes: dict[str, SandboxEnvironment]) -> None:
    init_subtask_store(Store())
    for expected, value in ((0.5, 1.0), (0.505, 1.0), (0.75, 0.0), (None, 0.0)):
        state = _state([_submit(1, answer="42")], expected_score=expected)
        score = await check_expected_score()(state, Target(""))
        assert score is not None
        assert score.as_float() == value
        assert score.metadata == {"replay": 0.5, "expected": expected}
