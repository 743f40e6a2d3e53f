"""The command `tasks`."""

from __future__ import annotations

from provisioner.cli.family_sessions import builder_session
from provisioner.cli.options import EnvFileOption, FamilyArgument, Launch
from provisioner.cli.output import Result, table
from provisioner.clouds.registry import Where
from provisioner.images import build
from provisioner.session import Phases


def main(family: FamilyArgument, env_file: EnvFileOption = None, *, where: Where, launch: Launch) -> Result:
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
    for warning in setup.all_warnings:
        opened.progress.note(f"warning: {warning}")
    return Result({"family": loaded.name, "image": name, **setup.model_dump(mode="json")}, text)
