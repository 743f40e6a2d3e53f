"""Plays an agent without a model: runs a command in the machine, and submits what it prints.

inspect eval examples/inspect/port_scan.py --solver examples/inspect/scripted.py -S command='...' --model mockllm/model
"""

from inspect_ai.model import ChatMessageAssistant, ModelOutput, execute_tools
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.tool import ToolCall, bash


@solver
def scripted(command: str | list[str]) -> Solver:
    """Returns the solver.

    Args:
        command: for the tool `bash`. Inspect's command line reads it as YAML, and makes a list of a text with commas.
    """
    script = ",".join(command) if isinstance(command, list) else command

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        call = ToolCall(id="scripted", function="bash", arguments={"command": script})
        message = ChatMessageAssistant(content="I run what the script says.", tool_calls=[call])
        done = await execute_tools([message], [bash()])
        state.messages += [message, *done.messages]
        state.output = ModelOutput.from_content("scripted", done.messages[-1].text)
        return state

    return solve
