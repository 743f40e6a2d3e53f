"""A word at the end of three hops. An Inspect eval in a private network of four virtual machines.

inspect eval examples/inspect/four_machines.py --model MODEL
"""

from pathlib import Path

from inspect_ai import Task, task
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.tool import bash

CONFIGURATION = Path(__file__).with_name("four_machines.yaml")


@task
def four_machines() -> Task:
    """Asks for a word that one machine keeps, another names the way to, and a third knows whom to ask."""
    question = "The machine vault keeps a word. Begin at http://web/ and submit the word."
    return Task(
        dataset=[Sample(input=question, target="cormorant")],
        solver=react(tools=[bash()]),
        scorer=includes(),
        sandbox=("provisioner", str(CONFIGURATION)),
        time_limit=1800,
    )
