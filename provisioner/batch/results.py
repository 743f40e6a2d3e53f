"""The results of runs: one row per run, and their text as JSON Lines and CSV. Pure."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

from pydantic import AwareDatetime, Field

from provisioner.base.models import Phase, Record
from provisioner.base.printable import spreadsheet_cell
from provisioner.batch.score_log import ScoreLog

Outcome = Literal[
    "scored",  # with a number, or without one if the family says that there is none
    "task_failed",  # the family's own code failed
    "agent_failed",  # the agent ended with an error, switched its machine off, or its submission cannot be read
    "timed_out",  # the agent did not end in time
    "infrastructure_failed",  # provisioner's or the cloud's fault, and there are no retries left
    "over_budget",  # it never fit the budget
    "cancelled",
]

# What views call the outcomes, the best first. Each has a colour and a shape in the report's templates.
OUTCOMES = {
    "scored": "scored",
    "task_failed": "the task's own code failed",
    "agent_failed": "the agent failed",
    "timed_out": "the agent ran out of time",
    "infrastructure_failed": "infrastructure failed",
    "over_budget": "over budget",
    "cancelled": "cancelled",
}
# The name of the phase that stands for all attempts but the last.
EARLIER = "earlier attempts"

# Rows pass through the queue, which others may be able to write to: what views compute with and print is bounded. What
# we write is far below that. The other fields are compared with the suite's.
Text = Annotated[str, Field(max_length=16_384)]
ByRole = Annotated[dict[Text, Text], Field(max_length=10)]


class Row(Record):
    """The result of one run.

    Args:
        key: the run's, see suite.Run.
        family_version: as the family's manifest has it; empty if it has none.
        agent_files: the SHA-256 of the agent's files and links, as they were sent; empty for a submission.
        score: None without a number.
        message: why it has this outcome, and what went wrong beside it.
        agent_exit_code: None if a submission stood in for the agent, or if the agent never ended by itself.
        attempts: how many environments were launched for the run.
        retried: why each of them but the last failed.
        environment: id of the last one, under which the archive has its logs.
        machine_types: by role; empty on a cloud without machine types.
        images: by role.
        cost_micro_usd: of all attempts, in millionths of a US dollar.
        score_log: the last attempt's intermediate scores, bounded as score_log.py says.
        score_log_entries: how many intermediate scores there were; None if the score log could not be read.
        phases: those of the last attempt, after one phase for all earlier attempts.
        recording: the hash of the last environment's sealed logs, which `provisioner verify` checks; empty for none.
        warnings: what may spoil the result, such as a task that differs at each call of get_tasks.
        version: of provisioner.
    """

    key: str
    family: str
    task: str
    agent: str
    repetition: int
    outcome: Outcome
    family_version: Text = ""
    agent_files: Text = ""
    score: float | None = None
    message: Text = ""
    agent_exit_code: Annotated[int, Field(ge=-(2**31), le=2**31)] | None = None
    attempts: int = Field(default=1, ge=0, le=1000)
    retried: tuple[Text, ...] = Field(default=(), max_length=1000)
    environment: Text = ""
    cloud: Text = ""
    region: Text = ""
    machine_types: ByRole = Field(default_factory=dict)
    images: ByRole = Field(default_factory=dict)
    cost_micro_usd: int = Field(default=0, ge=0, le=2**53)
    started_at: AwareDatetime | None = None
    ended_at: AwareDatetime | None = None
    phases: tuple[Phase, ...] = Field(default=(), max_length=1000)
    score_log: ScoreLog = ()
    score_log_entries: int | None = Field(default=None, ge=0, le=2**53)
    recording: Text = ""
    warnings: tuple[Text, ...] = Field(default=(), max_length=100)
    version: Text = ""


def by_task_and_agent(rows: Iterable[Row]) -> dict[tuple[str, str], list[Row]]:
    """Groups rows by (family/task, agent), in the order of their first appearance."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((f"{row.family}/{row.task}", row.agent), []).append(row)
    return groups


def as_jsonl(rows: Iterable[Row]) -> str:
    """Returns one JSON object per line. A score that is not a number is written as NaN."""
    return "".join(json.dumps(row.model_dump(mode="json")) + "\n" for row in rows)


def as_csv(rows: Sequence[Row]) -> str:
    """Returns one line per row, below a line of headings. Lists and mappings are JSON in their cells.

    The score log is left out: it would be more than a spreadsheet's cell can hold.

    What a spreadsheet could take for a formula has an apostrophe in front; as_jsonl has the text as it is.
    """
    text = io.StringIO()
    names = [name for name in Row.model_fields if name != "score_log"]
    writer = csv.DictWriter(text, fieldnames=names, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        values = row.model_dump(mode="json", exclude={"score_log"})
        writer.writerow({name: spreadsheet_cell(value) for name, value in values.items()})
    return text.getvalue()
