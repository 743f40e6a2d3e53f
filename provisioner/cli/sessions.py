"""Opens the session of a command: its home, its cloud, its ledger."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from provisioner.base.config import load_settings
from provisioner.base.models import Environment
from provisioner.cli.command import default_home, progress, shield
from provisioner.cli.options import DATABASE_VARIABLE, Launch, checked_database
from provisioner.clouds.registry import Where, open_cloud
from provisioner.costs.ledger import Spending
from provisioner.environment.selection import launches, refuse_part_of_id
from provisioner.family.env_file import load_env_file
from provisioner.session import Session


def session(
    env_file: Path | None = None, where: Where | None = None, launch: Launch | None = None, database: str = ""
) -> Session:
    """Opens the session of a command.

    Args:
        env_file: the file with the task's secrets.
        where: the cloud and its options; by default the default cloud.
        launch: the time to live, the budget, whether machines may start from templates, and whether they are recorded.
        database: the URL of the database that workers share; empty for none.

    Raises:
        UsageError: an option's value is not valid.
    """
    launch = launch or Launch()
    ttl, budget = launch.time_to_live, launch.usd
    home, settings = default_home(), load_settings()
    if not launch.templates:
        settings = settings.model_copy(update={"templates": False})
    return Session(
        home=home,
        cloud=open_cloud(home, settings, where or Where()),
        progress=progress(),
        variables=load_env_file(env_file) if env_file else {},
        shield=shield,
        ca_bundle=settings.ca_bundle_path,
        base_image=settings.base_image,
        ttl=ttl,
        time_limits=settings.time_limits,
        spending=Spending.of(settings, budget),
        database=database,
        record=launch.record,
    )


def session_of(environment: Environment, opened: Session) -> Session:
    """Returns the session on an environment's cloud, with the ledger of its reservation if that is configured."""
    if environment.shared_ledger and not opened.database:
        opened = replace(opened, database=shared_database())
    where = Where.of(environment.cloud, environment.placement)
    return replace(opened, cloud=open_cloud(opened.home, load_settings(), where))


def damaged_session(environment_id: str, opened: Session) -> Session:
    """Returns the session on the cloud of an environment whose record cannot be read, as the ledgers name it."""
    shared = replace(opened, database=shared_database())
    for candidate in (opened, shared):
        for entry in launches(candidate, environment_id):
            cloud = open_cloud(opened.home, load_settings(), Where.of(entry.cloud, {"region": entry.region}))
            return replace(candidate, cloud=cloud)
    return opened


def shared_database() -> str:
    """Returns the URL of the database that workers share, or an empty string if none is configured.

    Raises:
        UsageError: it is not the URL of a Postgres database.
    """
    return checked_database(os.environ.get(DATABASE_VARIABLE, ""))


def environment_session(name: str, env_file: Path | None = None) -> tuple[Session, Environment]:
    """Finds an environment by its id, or the id's beginning or end, and opens a session on its cloud.

    Raises:
        UsageError: there is no such environment, or a running batch has it and `name` is a part of its id.
    """
    opened = session(env_file)
    environment = opened.environments.find(name)
    refuse_part_of_id(opened, name, environment)
    return session_of(environment, opened), environment
