"""The command `up`: brings an environment up."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from provisioner.base.errors import UsageError
from provisioner.cli.commands.list import environment_data
from provisioner.cli.family_sessions import checked_session, destinations
from provisioner.cli.options import (
    FAMILY,
    TASK,
    AllowOption,
    EnvFileOption,
    KeepOption,
    Launch,
    NoRecordOption,
    NoTemplateOption,
)
from provisioner.cli.output import Result
from provisioner.cli.sessions import session
from provisioner.clouds.registry import Where
from provisioner.environment import lifecycle, snapshots


def main(
    family: Annotated[Path | None, FAMILY] = None,
    task: Annotated[str | None, TASK] = None,
    snapshot: Annotated[
        str | None, typer.Option("--from", metavar="NAME", help="Bring up a copy of a frozen environment.")
    ] = None,
    env_file: EnvFileOption = None,
    allow: AllowOption = None,
    no_template: NoTemplateOption = False,
    no_record: NoRecordOption = False,
    keep: KeepOption = False,
    *,
    where: Where,
    launch: Launch,
) -> Result:
    """Brings an environment up."""
    if snapshot is not None:
        if family or task or env_file or allow or no_template or no_record or keep:
            raise UsageError(
                "--from takes no FAMILY, TASK, --env-file, --allow, --no-template, --no-record or --keep: "
                "a copy has all of these from its snapshot."
            )
        environment = snapshots.up(session(where=where, launch=launch), snapshot)
    elif family is None or task is None:
        raise UsageError("Give FAMILY and TASK, or --from NAME.")
    else:
        launch = replace(launch, templates=not no_template, record=not no_record)
        opened, loaded = checked_session(family, task, env_file, where, launch)
        environment = lifecycle.up(replace(opened, keep_failed=keep), loaded, task, destinations(allow))
    secrets = f" --env-file {shlex.quote(str(env_file))}" if env_file else ""
    next_steps = {
        f"provisioner ssh {environment.id}": "a shell as the agent",
        f"provisioner score {environment.id}{secrets}": "score its submission file",
        f"provisioner destroy {environment.id}": "remove it",
    }
    width = max(map(len, next_steps)) + 4
    text = "\n".join(
        [
            environment.id,
            "",
            *(f"  {step:{width}}{what}" for step, what in next_steps.items()),
            "",
            f"It ends on its own at {environment.expires_at:%H:%M:%S} UTC; `provisioner extend` gives it more time.",
        ]
    )
    return Result(environment_data(environment), text)
