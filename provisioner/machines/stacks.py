"""Finds the Terraform roots that environments belong to and removes unused ones."""

from __future__ import annotations

from provisioner.models import Environment
from provisioner.session import Session
from provisioner.terraform.stack import Stack

# Prefix of the names of stacks that environments share.
NETWORK_STACK = "network-"


def stack_of(session: Session, environment: Environment) -> Stack:
    """Returns the Terraform root that the environment belongs to."""
    variables = session.cloud.terraform_variables
    return Stack(session.home.stacks / environment.stack, check=session.check, cloud_variables=variables)


def discard_unused_stacks(session: Session) -> None:
    """Removes the directories of stacks without environments, which a crash during their removal leaves behind."""
    # Directories first: a record is written before its stack.
    directories = [path for path in session.home.stacks.glob("*/") if not path.name.startswith((".", NETWORK_STACK))]
    if session.environments.unreadable():
        return
    in_use = {environment.stack for environment in session.environments.readable()}
    for directory in directories:
        if directory.name not in in_use:
            Stack(directory).discard()
