"""The command `destroy`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated

import typer

from provisioner.base.errors import ProvisionerError, UsageError
from provisioner.base.models import Environment
from provisioner.base.progress import describe
from provisioner.cli.completion import environment_ids
from provisioner.cli.options import EnvFileOption
from provisioner.cli.output import Result
from provisioner.cli.sessions import damaged_session, session, session_of
from provisioner.environment import lifecycle, selection
from provisioner.session import Session


def main(
    environments: Annotated[
        list[str] | None, typer.Argument(metavar="ENV...", help="Ids of environments.", autocompletion=environment_ids)
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Destroy all environments and image builders.")] = False,
    env_file: EnvFileOption = None,
) -> Result:
    """Destroys environments, one after the other. A failure of any kind does not stop the others."""
    opened = session(env_file)
    if everything == bool(environments):
        raise UsageError("Give either the ids of environments or --all.")
    selected = selection.select_for_destroy(opened, environments or [], everything=everything)
    failures: dict[str, ProvisionerError] = {}

    def attempt(name: str, work: Callable[[], object]) -> None:
        try:
            work()
        except ProvisionerError as error:
            failures[name] = error
        except Exception as error:
            failures[name] = ProvisionerError(f"Unexpected {describe(error)}")

    for environment in selected.live:
        attempt(environment.id, partial(_destroy, opened, environment))
    for name in selected.damaged:
        attempt(name, partial(_destroy_damaged, opened, name))
    names = [*(environment.id for environment in selected.live), *selected.damaged]
    done = [name for name in names if name not in failures]
    lines = [f"{name}: destroyed" for name in done] + [f"{name}: already gone" for name in selected.gone]
    lines += [f"{name}: NOT destroyed: {error.message} {error.hint or ''}".rstrip() for name, error in failures.items()]
    data = {
        "destroyed": done,
        "already_gone": selected.gone,
        "failed": [{"environment": name, "message": error.message} for name, error in failures.items()],
    }
    exit_code = next((error.exit_code for error in failures.values()), 0)
    return Result(data, "\n".join(lines) or "Nothing to destroy.", exit_code)


def _destroy(opened: Session, environment: Environment) -> None:
    lifecycle.destroy(session_of(environment, opened), environment)


def _destroy_damaged(opened: Session, name: str) -> None:
    opened.progress.note(f"The record of {name} cannot be read: destroying it without its teardown")
    selection.destroy_damaged(damaged_session(name, opened), name)
