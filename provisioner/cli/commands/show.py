"""The command `show`: an environment's record. It asks no machine and no cloud, and so answers at once."""

from __future__ import annotations

from datetime import timedelta

from provisioner.base.clock import format_duration
from provisioner.base.models import Environment
from provisioner.cli.command import default_home
from provisioner.cli.commands.list import environment_data, is_orphan
from provisioner.cli.options import PastEnvironmentArgument
from provisioner.cli.output import Result
from provisioner.environment.outcomes import described
from provisioner.recording.casts import parts_of
from provisioner.store.environments import EnvironmentStore

# How many recorded parts are named.
PARTS_SHOWN = 20


def main(env: PastEnvironmentArgument) -> Result:
    """Shows an environment's record."""
    store = EnvironmentStore(default_home())
    environment = store.find(env, archived=True)
    exists = store.directory(environment.id).exists()
    orphan = exists and is_orphan(store, environment)
    parts = [path.stem for path in parts_of(store.logs(environment.id))]
    data = {**environment_data(environment), "exists": exists, "orphan": orphan, "parts": parts}
    purpose = "builds an image" if environment.kind == "builder" else f"task {environment.task}"
    lines = [
        f"{environment.id}  {environment.status if exists else 'gone'}{', orphan' if orphan else ''}",
        f"  family {environment.family}, {purpose}, cloud {environment.cloud}",
        f"  created {environment.created_at:%Y-%m-%d %H:%M:%S} UTC"
        + (f", ends at {environment.expires_at:%Y-%m-%d %H:%M:%S} UTC at the latest" if exists else ""),
    ]
    if orphan:
        lines.append(f"  the command that managed it has ended: `provisioner destroy {environment.id}` removes it")
    if environment.snapshot:
        lines.append(f"  copied from the snapshot {environment.snapshot}")
    for role, machine in environment.machines.items():
        endpoint = environment.endpoints.get(role)
        where = origin = ""
        if endpoint and exists:
            where = ", ssh " + (
                "in its own network namespace" if endpoint.pidfile else f"{endpoint.host}:{endpoint.port}"
            )
        if endpoint and endpoint.origin:
            origin = f", started by {endpoint.origin}"
        size = machine.size
        shape = f"{size.cpus} vCPU, {size.memory_gib:g} GiB, {size.disk_gib} GiB disk"
        system = f"{machine.distribution}, " if machine.distribution else ""
        lines.append(f"  {role}: {shape}, {system}{machine.image}{where}{origin}")
    if environment.versions:
        lines.append(f"  versions: {', '.join(f'{name} {value}' for name, value in environment.versions.items())}")
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


def _recorded(environment: Environment, parts: list[str]) -> list[str]:
    """Says whether an environment is recorded, which parts there are, and how to replay them."""
    if not parts:
        return ["recorded: nothing so far" if environment.recorded else "not recorded"]
    more = f" and {len(parts) - PARTS_SHOWN} more" if len(parts) > PARTS_SHOWN else ""
    return [
        f"recorded: {', '.join(parts[:PARTS_SHOWN])}{more}",
        f"to replay: provisioner replay {environment.id} --part {parts[0]}",
    ]
