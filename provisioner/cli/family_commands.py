"""The commands `tasks` and `doctor`."""

from __future__ import annotations

import typer

from provisioner.cli.context import EnvFileOption, FamilyArgument, Launch, builder_session, command, session
from provisioner.cli.output import Result, table
from provisioner.clouds.registry import Where
from provisioner.errors import HostError
from provisioner.images import build
from provisioner.session import Phases
from provisioner.terraform import requirements


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    command(app, "tasks")(tasks)
    command(app, "doctor")(doctor)


def tasks(family: FamilyArgument, env_file: EnvFileOption = None, *, where: Where, launch: Launch) -> Result:
    """Lists a family's tasks. Only its code in a machine knows them, so this builds a missing image."""
    opened, loaded = builder_session(family, env_file, where, launch)
    with Phases(opened.progress).phase("images"):
        name, setup = build.family_image(opened, loaded)
    rows = [
        [
            task,
            "internet" if data.full_internet else "offline",
            "aux VM" if data.aux_vm_spec else "-",
            ", ".join(data.required_environment_variables) or "-",
        ]
        for task, data in setup.tasks.items()
    ]
    text = table(["TASK", "NETWORK", "AUX VM", "VARIABLES"], rows)
    for warning in setup.warnings:
        opened.progress.note(f"warning: {warning}")
    return Result({"family": loaded.name, "image": name, **setup.model_dump(mode="json")}, text)


def doctor(*, where: Where) -> Result:
    """Shows what this machine lacks for the cloud."""
    opened = session(where=where)
    problems = [*requirements.problems(), *opened.cloud.problems()]
    notes = opened.cloud.notes()
    data = {
        "problems": [{"problem": problem, "remedy": remedy} for problem, remedy in problems],
        "notes": notes,
    }
    lines = [f"missing: {problem}\n     do: {remedy}" for problem, remedy in problems]
    lines += [f"note: {note}" for note in notes]
    if not problems:
        lines.append(f"Ready: this machine has everything that the {opened.cloud.name} cloud needs.")
    return Result(data, "\n".join(lines), HostError.exit_code if problems else 0)
