"""A word that another container keeps. An Inspect eval with a compose file, in a virtual machine with a Docker Engine.

inspect eval examples/inspect/two_containers.py --model MODEL
"""

from pathlib import Path

from inspect_ai import Task, task
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.tool import bash

COMPOSE_FILE = Path(__file__).parent / "containers" / "compose.yaml"


@task
def two_containers() -> Task:
    """Asks for a word that a service in the same network tells to visitors who ask politely."""
    question = "The host keeper tells visitors of its port 7000 a word, if they ask politely. Submit the word."
    return Task(
        dataset=[Sample(input=question, target="cormorant")],
        solver=react(tools=[bash()]),
        scorer=includes(),
        sandbox=("provisioner", str(COMPOSE_FILE)),
        time_limit=1800,
    )
