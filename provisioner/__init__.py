"""Runs METR Task Standard tasks in isolated virtual machines, scores them and leaves nothing behind.

This is the public API; everything else may change.

    from provisioner import Home, LocalCloud, Session, load_family, load_settings, run

    home = Home.default()
    session = Session(home=home, cloud=LocalCloud(home, load_settings()))
    result = run(session, load_family(Path("examples/number_guess")), "easy", submission="42")
    print(result.outcome.score)

Names are imported on first use, since Terraform often starts small parts of this package on their own.
"""

from __future__ import annotations

# Not typing's, and importlib below: a command imports this before it can handle Ctrl-C.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from provisioner.base.config import load_settings
    from provisioner.base.errors import ProvisionerError
    from provisioner.base.models import Environment
    from provisioner.clouds.aws.cloud import AwsCloud
    from provisioner.clouds.local.cloud import LocalCloud
    from provisioner.environment.agent import AgentCommand
    from provisioner.environment.lifecycle import destroy, intermediate_score, score, up
    from provisioner.environment.run import RunResult, run, run_tests
    from provisioner.family.loader import load_family
    from provisioner.session import Session
    from provisioner.store.home import Home

_HOMES = {
    "AgentCommand": "environment.agent",
    "AwsCloud": "clouds.aws.cloud",
    "Environment": "base.models",
    "Home": "store.home",
    "LocalCloud": "clouds.local.cloud",
    "ProvisionerError": "base.errors",
    "RunResult": "environment.run",
    "Session": "session",
    "destroy": "environment.lifecycle",
    "intermediate_score": "environment.lifecycle",
    "load_family": "family.loader",
    "load_settings": "base.config",
    "run": "environment.run",
    "run_tests": "environment.run",
    "score": "environment.lifecycle",
    "up": "environment.lifecycle",
}

__all__ = [
    "AgentCommand",
    "AwsCloud",
    "Environment",
    "Home",
    "LocalCloud",
    "ProvisionerError",
    "RunResult",
    "Session",
    "destroy",
    "intermediate_score",
    "load_family",
    "load_settings",
    "run",
    "run_tests",
    "score",
    "up",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'provisioner' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"provisioner.{_HOMES[name]}"), name)
