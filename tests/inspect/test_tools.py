"""Shows that Inspect's own tools work in a machine: all that it puts into a sandbox, or runs beside one."""

from __future__ import annotations

import json
import shlex
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import anyio
import pytest
from inspect_ai import Task, eval, task_with
from inspect_ai.agent import AgentState, human_cli, sandbox_agent_bridge
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.tool import Tool, bash, bash_session, mcp_server_sandbox, python, text_editor
from inspect_ai.util import sandbox

from provisioner.inspect.scoring import ScoringTools
from provisioner.inspect.task_family import task_family
from provisioner.store.home import Home
from tests.command_line import ROOT

pytestmark = [
    pytest.mark.vm,
    pytest.mark.timeout(1800),
    pytest.mark.xdist_group("tools"),
    pytest.mark.filterwarnings("default"),  # Inspect's own deprecations
]
JSON_TYPE = "Content-Type: application/json"
MCP_SERVER = r"""
import json, sys
TOOL = {"name": "add", "description": "Adds.", "inputSchema": {"type": "object", "properties": {
    "a": {"type": "integer", "description": "one"}, "b": {"type": "integer", "description": "other"}}}}
for line in sys.stdin:
    asked = json.loads(line)
    answers = {
        "initialize": lambda: {"protocolVersion": asked["params"]["protocolVersion"],
                               "capabilities": {"tools": {}}, "serverInfo": {"name": "sums", "version": "1"}},
        "tools/list": lambda: {"tools": [TOOL]},
        "tools/call": lambda: {"content": [{"type": "text", "text": str(sum(asked["params"]["arguments"].values()))}]},
    }
    if "id" in asked:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": answers[asked["method"]]()}), flush=True)
"""


async def _told(tool: Tool, **arguments: object) -> str:
    return str(await tool(**arguments))


async def commands() -> None:
    """Calls the tools that run a command each."""
    assert "42\n" in await _told(bash(), command="echo $((6 * 7))")
    assert "42\n" in await _told(python(), code="print(6 * 7)")


async def sessions(directory: str = "/srv") -> None:
    """Calls the shell that stays open between calls."""
    shell = bash_session()
    await _told(shell, action="type_submit", input=f"cd {directory}; answer=$((6 * 7))")
    assert f"{directory} 42" in await _told(shell, action="type_submit", input="echo $PWD $answer")


async def editor(directory: str = "/srv") -> None:
    """Calls the editor of files."""
    tool, note = text_editor(), f"{directory}/note.txt"
    await _told(tool, command="create", path=note, file_text="one\ntwo\n")
    await _told(tool, command="str_replace", path=note, old_str="two", new_str="three")
    assert await sandbox().read_file(note) == "one\nthree\n"


async def remote_processes() -> None:
    """Follows a process, and ends another."""
    done = await sandbox().exec_remote(["sh", "-c", "echo out; echo err >&2; exit 3"], stream=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "out\n", "err\n")
    sleeping = await sandbox().exec_remote(["sleep", "1234"])
    assert (await sandbox().exec(["pgrep", "-f", "sleep 1234"])).success
    await sleeping.kill()
    assert not (await sandbox().exec(["pgrep", "-xf", "sleep 1234"])).success


async def tool_server() -> None:
    """Calls a tool of an MCP server that runs in the machine."""
    await sandbox().write_file("/srv/server.py", MCP_SERVER)
    [add] = await mcp_server_sandbox(command="python3", args=["/srv/server.py"]).tools()
    assert "42" in await _told(add, a=40, b=2)


async def bridge() -> None:
    """Lets a program in the machine ask the eval's model."""
    async with sandbox_agent_bridge(AgentState(messages=[])) as opened:
        asked = {"model": "inspect", "messages": [{"role": "user", "content": "What is the word?"}]}
        url = f"http://localhost:{opened.port}/v1/chat/completions"
        # Inspect's proxy is a packed program, which a busy host takes a minute to unpack and start. Without a delay
        # given, curl would wait twice as long before each new attempt.
        command = [*shlex.split("curl -sS --retry-connrefused --retry 200 --retry-delay 1 -d @- -H"), JSON_TYPE]
        done = await sandbox().exec([*command, url], input=json.dumps(asked), timeout=240)
    assert done.stdout, done
    assert json.loads(done.stdout)["choices"][0]["message"]["content"] == "cormorant", done


async def person() -> None:
    """Has a person log in and submit."""
    answers: list[str] = []

    async def work() -> None:
        for command, said in (("start", ""), ("submit cormorant", "y\n")):
            line = f"python3 /opt/human_agent/task.py {command}"
            while not (done := await sandbox().exec(["bash", "-c", line], input=said, timeout=60)).success:
                await anyio.sleep(1)
            answers.append(done.stdout)

    async with anyio.create_task_group() as group:
        group.start_soon(work)
        state = await human_cli()(AgentState(messages=[]))
    assert state.output.completion == "cormorant", answers


PARTS: dict[str, Callable[[], Awaitable[None]]] = {
    part.__name__: part for part in (commands, sessions, editor, remote_processes, tool_server, bridge, person)
}


async def identity() -> None:
    """Asks the tools who they are: the agent, not root."""
    assert (await _told(bash(), command="id -un")).strip() == "agent"
    assert "1000\n" in await _told(python(), code="import os; print(os.getuid())")
    assert (await sandbox().exec(["stat", "-c", "%U", "/home/agent/note.txt"])).stdout == "agent\n"


async def both_scorings() -> None:
    """Scores in between, as the agent may, and submits something that scores otherwise."""
    score, score_log = await ScoringTools().tools()
    assert json.loads(await _told(score))["message"] == {"hint": "in between"}
    assert [entry["score"] for entry in json.loads(await _told(score_log))] == [0.1, 0.1]
    await _told(bash(), command="echo 0.5 > submission.txt")


PARTS_AS_AGENT: dict[str, Callable[[], Awaitable[None]]] = {
    "commands": commands,
    "sessions": partial(sessions, "/home/agent"),
    "editor": partial(editor, "/home/agent"),
    "identity": identity,
    "both scorings": both_scorings,
}


@solver
def each_part(parts: dict[str, Callable[[], Awaitable[None]]], problems: dict[str, BaseException]) -> Solver:
    """Uses one tool after the other, and collects what fails."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        for name, part in parts.items():
            try:
                await part()
            except Exception as error:
                problems[name] = error
        return state

    return solve


def test_inspects_tools_work_in_a_machine(home: Home, tmp_path: Path) -> None:
    answer = ModelOutput.from_content("mockllm/model", "cormorant")
    answer.usage = ModelUsage()  # without it Inspect would download a table to count tokens
    problems: dict[str, BaseException] = {}
    task = Task(dataset=[Sample(input="x")], solver=each_part(PARTS, problems), sandbox="provisioner")
    [log] = eval(task, model=get_model("mockllm/model", custom_outputs=[answer]), log_dir=str(tmp_path), display="none")
    assert problems == {}
    assert log.status == "success", log.error


def test_inspects_tools_work_as_the_agent_in_a_family(home: Home, tmp_path: Path) -> None:
    problems: dict[str, BaseException] = {}
    family = task_family(family=str(ROOT / "tests" / "contract" / "families" / "both_scorings"))
    task = task_with(family, solver=each_part(PARTS_AS_AGENT, problems))
    [log] = eval(task, model="mockllm/model", log_dir=str(tmp_path), display="none")
    assert problems == {}
    assert log.status == "success", log.error
    [sample] = log.samples or []
    assert sample.scores is not None
    assert sample.scores["score_metr_task"].value == 0.5
    scores = [entry["score"] for entry in sample.store["TaskDriverStore:intermediate_scores"]]
    assert scores == [0.1, 0.1, 0.1]  # at the start, on request, and at the end
