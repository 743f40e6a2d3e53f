"""The Terraform roots that environments belong to."""

from __future__ import annotations

from provisioner.models import Environment
from provisioner.session import Session
from provisioner.terraform.stack import Stack

# Stacks of what environments share have names that begin so.
NETWORK_STACK = "network-"


def stack_of(session: Session, environment: Environment) -> Stack:
    """The Terraform root that the environment belongs to."""
    return Stack(session.home.stacks / environment.stack, check=session.check)


def discard_unused_stacks(session: Session) -> None:
    """Removes the directories of stacks that no environment belongs to: a crash came in the middle of their removal."""
    # The directories first: a record is there before its stack.
    directories = [path for path in session.home.stacks.glob("*/") if not path.name.startswith((".", NETWORK_STACK))]
    if session.environments.unreadable():
        return
    known = {one.stack for one in session.environments.readable()}
    for directory in directories:
        if directory.name not in known:
            Stack(directory).discard()
