"""The command `show`: an environment's record. It asks no machine and no cloud, and so answers at once."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import typer

from provisioner.base.clock import format_duration
from provisioner.base.models import Endpoint, Environment
from provisioner.cli.command import command
from provisioner.cli.home import default_home
from provisioner.cli.options import PastEnvironmentArgument
from provisioner.cli.output import Result
from provisioner.environment.outcomes import described
from provisioner.recording.casts import parts_of
from provisioner.store.environments import EnvironmentStore

# How many recorded parts are named.
PARTS_SHOWN = 20


def register(app: typer.Typer) -> None:
    """Adds the command."""
    command(app, "show")(show)


def show(env: PastEnvironmentArgument) -> Result:
    """Shows an environment's record."""
    store = EnvironmentStore(default_home())
    environment = store.find(env, archived=True)
    exists = store.directory(environment.id).exists()
    orphan = exists and is_orphan(store, environment)
    parts = [path.stem for path in parts_of(store.logs(environment.id))]
    data = {**environment_data(environment), "exists": exists, "orphan": orphan, "parts": parts}
    lines = [
        f"{environment.id}  {environment.status if exists else 'gone'}{', orphan' if orphan else ''}",
        f"  family {environment.family}, {_purpose(environment)}, cloud {environment.cloud}",
        f"  created {environment.created_at:%Y-%m-%d %H:%M:%S} UTC"
        + (f", ends at {environment.expires_at:%Y-%m-%d %H:%M:%S} UTC at the latest" if exists else ""),
    ]
    if orphan:
        lines.append(f"  the command that managed it has ended: `provisioner destroy {environment.id}` removes it")
    if environment.snapshot:
        lines.append(f"  copied from the snapshot {environment.snapshot}")
    for role, machine in environment.machines.items():
        endpoint = environment.endpoints.get(role)
        where = f", ssh {_where(endpoint)}" if endpoint and exists else ""
        size = machine.size
        shape = f"{size.cpus} vCPU, {size.memory_gib:g} GiB, {size.disk_gib} GiB disk"
        system = f"{machine.distribution}, " if machine.distribution else ""
        lines.append(f"  {role}: {shape}, {system}{machine.image}{where}{_origin(endpoint)}")
    limits = environment.time_limits.model_dump().items()
    named = [
        f"{name.removesuffix('_seconds')} {format_duration(timedelta(seconds=seconds))}" for name, seconds in limits
    ]
    lines.append(f"  time limits: {', '.join(named)}")
    wrong = [probe for probe in environment.probes if probe.reached != probe.expected]
    tested = f"{len(environment.probes)} probes, {len(wrong)} contradict the permission"
    lines.append(f"  isolation: {tested if environment.probes else 'not proven'}")
    lines += [f"  {phase.name}: {phase.seconds:.1f} s" for phase in environment.phases]
    lines += [f"  warning: {warning}" for warning in environment.setup.warnings]
    lines += [f"  {line}" for line in described(environment)]
    lines += [f"  {line}" for line in _recorded(environment, parts)]
    if environment.gone_at:
        lines.append(f"  gone since {environment.gone_at:%Y-%m-%d %H:%M:%S} UTC, as the cloud confirmed")
    if environment.recording:
        lines.append(f"  sealed as {environment.recording}")
    return Result(data, "\n".join(lines))


def _purpose(environment: Environment) -> str:
    return "builds an image" if environment.kind == "builder" else f"task {environment.task}"


def _recorded(environment: Environment, parts: list[str]) -> list[str]:
    """Says whether an environment is recorded, which parts there are, and how to replay them."""
    if not parts:
        return ["recorded: nothing so far" if environment.recorded else "not recorded"]
    more = f" and {len(parts) - PARTS_SHOWN} more" if len(parts) > PARTS_SHOWN else ""
    return [
        f"recorded: {', '.join(parts[:PARTS_SHOWN])}{more}",
        f"to replay: provisioner replay {environment.id} --part {parts[0]}",
    ]


def _where(endpoint: Endpoint) -> str:
    return "in its own network namespace" if endpoint.pidfile else f"{endpoint.host}:{endpoint.port}"


def _origin(endpoint: Endpoint | None) -> str:
    """Says how a machine started, where there is more than one way."""
    return f", started by {endpoint.origin}" if endpoint and endpoint.origin else ""


def environment_data(environment: Environment) -> dict[str, Any]:
    """Returns an environment's record for --json."""
    data = environment.model_dump(mode="json")
    return {"environment": data.pop("id"), **data}


def is_orphan(store: EnvironmentStore, environment: Environment) -> bool:
    """Whether the command that managed an environment has ended."""
    return environment.needs_command and not store.is_attended(environment.id)
