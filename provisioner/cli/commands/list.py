"""The command `list`: what is there. It asks no machine and no cloud elsewhere, and so answers at once."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from provisioner.base.clock import elapsed, format_duration, now
from provisioner.base.errors import InfrastructureError
from provisioner.base.models import Environment
from provisioner.cli.command import default_home, progress
from provisioner.cli.output import Result, table
from provisioner.store.environments import EnvironmentStore


def main() -> Result:
    """Lists all live environments and image builders."""
    store = EnvironmentStore(default_home())
    readable, unreadable = store.readable(), store.unreadable()
    orphans = [environment.id for environment in readable if is_orphan(store, environment)]
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


def _ended(store: EnvironmentStore, environment: Environment) -> list[str]:
    """Names the machines of this host that have ended or stand still although they should run. Asks no other cloud."""
    if environment.cloud != "local" or environment.status != "ready":
        return []
    from provisioner.clouds.local.vm.processes import is_stopped
    from provisioner.clouds.local.vm.qemu import PIDFILE, live_pid

    told = []
    for role in environment.machines:
        pid = live_pid(store.directory(environment.id) / role / PIDFILE)
        if pid is None or is_stopped(pid):
            told.append(f"{environment.hostname(role)} {'has ended' if pid is None else 'is stopped'}")
    return told


def _age(environment: Environment) -> str:
    minutes = int(elapsed(environment.created_at, now()).total_seconds() // 60)
    return f"{minutes // 60}h{minutes % 60:02d}m" if minutes >= 60 else f"{minutes}m"


def _time_left(environment: Environment) -> str:
    remaining = environment.expires_at - now()
    return format_duration(remaining) if remaining > timedelta(0) else "expired"


def environment_data(environment: Environment) -> dict[str, Any]:
    """Returns an environment's record for --json."""
    data = environment.model_dump(mode="json")
    return {"environment": data.pop("id"), **data}


def is_orphan(store: EnvironmentStore, environment: Environment) -> bool:
    """Whether the command that managed an environment has ended."""
    return environment.needs_command and not store.is_attended(environment.id)
