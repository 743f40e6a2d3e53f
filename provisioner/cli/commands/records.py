"""Provides the commands `list` and `show`. They ask no machine and no cloud elsewhere, and so answer at once."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import typer

from provisioner.cli.command import command, progress
from provisioner.cli.home import default_home
from provisioner.cli.options import PastEnvironmentArgument
from provisioner.cli.output import Result, table
from provisioner.clock import elapsed, now
from provisioner.environment.verdicts import described
from provisioner.errors import InfrastructureError
from provisioner.models import Endpoint, Environment
from provisioner.recording.casts import parts_of
from provisioner.store.environments import EnvironmentStore
from provisioner.ttl import format_duration

# How many recorded parts are named.
PARTS_SHOWN = 20


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    command(app, "list")(list_environments)
    command(app, "show")(show)


def list_environments() -> Result:
    """Lists all live environments and image builders."""
    store = EnvironmentStore(default_home())
    readable, unreadable = store.readable(), store.unreadable()
    orphans = [environment.id for environment in readable if _is_orphan(store, environment)]
    rows = [
        [
            e.id,
            e.kind,
            ", ".join([e.status, *(["orphan"] if e.id in orphans else []), *_ended(store, e)]),
            e.family,
            e.task or "-",
            e.cloud,
            _age(e),
            _time_left(e),
            "internet" if e.full_internet else "offline",
            " ".join(filter(None, (e.batch, e.label))) or "-",
        ]
        for e in readable
    ]
    text = table(["ENV", "KIND", "STATUS", "FAMILY", "TASK", "CLOUD", "AGE", "LEFT", "NETWORK", "FOR"], rows)
    if orphans:
        text += (
            "\nThe commands that managed the orphans have ended: `provisioner destroy ENV` removes one, "
            "`provisioner sweep` all of a cloud."
        )
    for error in unreadable.values():
        progress().note(f"{error.message} {error.hint or ''}".rstrip())
    data = {
        "environments": [environment_data(environment) for environment in readable],
        "orphans": orphans,
        "unreadable": sorted(unreadable),
    }
    return Result(data, text, InfrastructureError.exit_code if unreadable else 0)


def _is_orphan(store: EnvironmentStore, environment: Environment) -> bool:
    return environment.needs_command and not store.is_attended(environment.id)


def _ended(store: EnvironmentStore, environment: Environment) -> list[str]:
    """Names the machines of this host that have ended or stand still although they should run. Asks no other cloud."""
    if environment.cloud != "local" or environment.status != "ready":
        return []
    from provisioner.clouds.local.vm.processes import is_stopped
    from provisioner.clouds.local.vm.qemu import live_pid

    told = []
    for role in environment.machines:
        pid = live_pid(store.directory(environment.id) / role / "qemu.pid")
        if pid is None or is_stopped(pid):
            told.append(f"{environment.hostname(role)} {'has ended' if pid is None else 'is stopped'}")
    return told


def _age(environment: Environment) -> str:
    minutes = int(elapsed(environment.created_at, now()).total_seconds() // 60)
    return f"{minutes // 60}h{minutes % 60:02d}m" if minutes >= 60 else f"{minutes}m"


def _time_left(environment: Environment) -> str:
    remaining = environment.expires_at - now()
    return format_duration(remaining) if remaining > timedelta(0) else "expired"


def show(env: PastEnvironmentArgument) -> Result:
    """Shows an environment's record."""
    store = EnvironmentStore(default_home())
    environment = store.find(env, archived=True)
    exists = store.directory(environment.id).exists()
    orphan = exists and _is_orphan(store, environment)
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
