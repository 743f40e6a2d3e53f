"""The command `extend`: gives an environment more time."""

from __future__ import annotations

from typing import Annotated

import typer

from provisioner.base.clock import parse_duration
from provisioner.cli.options import EnvironmentArgument
from provisioner.cli.output import Result
from provisioner.cli.sessions import environment_session
from provisioner.environment.lifecycle import extend as extend_environment


def main(
    env: EnvironmentArgument,
    by: Annotated[str, typer.Argument(metavar="TIME", help="How much longer it may live, such as 30m or 1h.")],
) -> Result:
    """Extends the time to live: in the reservation, the schedule or watchdog, and the timers in the machines."""
    duration = parse_duration(by)
    opened, environment = environment_session(env)
    environment = extend_environment(opened, environment, duration)
    data = {"environment": environment.id, "expires_at": environment.expires_at.isoformat()}
    return Result(data, f"{environment.id} ends at {environment.expires_at:%Y-%m-%d %H:%M:%S} UTC at the latest.")
