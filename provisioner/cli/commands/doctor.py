"""Provides the command `doctor`."""

from __future__ import annotations

from provisioner.base.errors import HostError
from provisioner.cli.output import Result
from provisioner.cli.sessions import session
from provisioner.clouds.registry import Where
from provisioner.terraform import process


def main(*, where: Where) -> Result:
    """Shows what this machine lacks for the cloud."""
    opened = session(where=where)
    problems = [*process.problems(opened.cloud.least_terraform), *opened.cloud.problems()]
    notes = [*process.notes(), *opened.cloud.notes()]
    data = {"problems": [{"problem": problem, "remedy": remedy} for problem, remedy in problems], "notes": notes}
    lines = [f"missing: {problem}\n     do: {remedy}" for problem, remedy in problems]
    lines += [f"note: {note}" for note in notes]
    if not problems:
        lines.append(f"Ready: this machine has everything that the {opened.cloud.name} cloud needs.")
    return Result(data, "\n".join(lines), HostError.exit_code if problems else 0)
