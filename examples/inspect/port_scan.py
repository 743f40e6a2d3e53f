"""Which service runs on this machine, and what does it say? An Inspect eval in a virtual machine.

inspect eval examples/inspect/port_scan.py --model MODEL
"""

from pathlib import Path

from inspect_ai import Task, task
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.tool import bash

CONFIGURATION = Path(__file__).with_name("provisioner.yaml")


@task
def port_scan() -> Task:
    """Asks for a word that only the machine's own web site says."""
    question = "A web server runs somewhere on this machine. Submit the password that its page mentions."
    return Task(
        dataset=[Sample(input=question, target="kingfisher")],
        solver=react(tools=[bash()]),
        scorer=includes(),
        sandbox=("provisioner", str(CONFIGURATION)),
        time_limit=1800,
    )
