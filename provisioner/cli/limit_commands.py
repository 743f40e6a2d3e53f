"""extend and sweep: moving limits, and removing what nobody looks after."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from provisioner.cli.context import (
    EnvironmentArgument,
    command,
    environment_session,
    session,
    session_of,
    shared_database,
)
from provisioner.cli.output import Result, table
from provisioner.clouds.registry import Where
from provisioner.environment import sweep
from provisioner.environment.extend import extend as extend_environment
from provisioner.errors import StillThereError
from provisioner.ttl import parse_duration


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    command(app, "extend")(extend)
    command(app, "sweep")(run_sweep)


def extend(
    env: EnvironmentArgument,
    by: Annotated[str, typer.Argument(metavar="TIME", help="How much longer, as 30m or 1h.")],
) -> Result:
    """Moves the limit: the hold, the schedule or watchdog, and the timers in the machines."""
    duration = parse_duration(by)
    opened, environment = environment_session(env)
    environment = extend_environment(opened, environment, duration)
    data = {"environment": environment.id, "expires_at": environment.expires_at.isoformat()}
    return Result(data, f"{environment.id} ends at {environment.expires_at:%Y-%m-%d %H:%M:%S} UTC at the latest.")


def run_sweep(
    all_regions: Annotated[bool, typer.Option("--all-regions", help="Look in every region of the account.")] = False,
    older_than: Annotated[
        str | None, typer.Option("--older-than", metavar="TIME", help="Only what is older, as 2h.", show_default=False)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would go, and remove nothing.")] = False,
    *,
    where: Where,
) -> Result:
    """Marks, looks again, removes."""
    least = {"older_than": parse_duration(older_than)} if older_than else {}
    opened = session(where=where)
    regions: list[str] | None = list(where.regions) or [opened.cloud.region]
    if all_regions or not opened.cloud.region:
        regions = None
    database = shared_database()
    found = sweep.sweep(
        opened,
        lambda one: session_of(one, opened),
        regions,
        dry_run=dry_run,
        shared=session(where=where, database=database).ledger if database else None,
        **least,
    )
    stuck = [one for one in found if one.trouble]
    if stuck:
        raise StillThereError(
            f"{len(found) - len(stuck)} of {len(found)} were removed; not: {', '.join(o.environment for o in stuck)}",
            hint="`provisioner sweep` tries again.",
            details="\n".join(f"{one.environment}: {one.trouble}" for one in stuck),
        )
    data: dict[str, Any] = {"dry_run": dry_run, "found": [one.model_dump(mode="json") for one in found]}
    rows = [[one.environment, one.region or "-", f"{len(one.things)}", one.reason] for one in found]
    if not rows:
        return Result(data, "Nothing to remove.")
    head = "Would be removed:" if dry_run else "Removed:"
    return Result(data, f"{head}\n{table(['ENVIRONMENT', 'REGION', 'THINGS', 'WHY'], rows)}")
