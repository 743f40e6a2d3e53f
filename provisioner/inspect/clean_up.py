"""Destroys the machines of Inspect's samples, or leaves them to the operator."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import click

from provisioner.base.config import load_settings
from provisioner.base.errors import InfrastructureError, ProvisionerError, UsageError
from provisioner.base.models import Environment
from provisioner.base.printable import printable
from provisioner.base.progress import best_effort, describe
from provisioner.clouds.registry import Where, open_cloud
from provisioner.environment import lifecycle, snapshots
from provisioner.environment.selection import Selection, launches, select_for_destroy
from provisioner.inspect.configuration import Configuration
from provisioner.inspect.evals import BATCH_PREFIX, Origin
from provisioner.inspect.failures import hint_of
from provisioner.inspect.sample import Ending, SampleMachines, open_session
from provisioner.session import Session
from provisioner.store.files import is_locked
from provisioner.store.snapshots import SnapshotStore

STILL_THERE = (
    "Its machines may still run and cost money until their time to live ends. "
    "Once you have fixed the problem above, run:",
    "    inspect sandbox cleanup provisioner",
)
# The samples of this process whose machines are up, by the environment's id.
MACHINES: dict[str, SampleMachines] = {}


def destroy(machines: SampleMachines) -> Ending | None:
    """Destroys a sample's machines. Safe to repeat: what could not be removed is tried again at the task's end.

    Raises:
        StillThereError: something could not be removed; it stays recorded.
    """
    try:
        ending = machines.destroy()
    finally:
        if failed := machines.failed:
            MACHINES[failed.id] = machines
    # A copy, made at once: the event loop adds samples meanwhile.
    for identity in [identity for identity, kept in MACHINES.copy().items() if kept is machines]:
        del MACHINES[identity]
    return ending


def leave(machines: SampleMachines) -> None:
    """Leaves a sample's machines to the operator, and says how to log in to each and when they end.

    Raises:
        UsageError: they have been destroyed in the meantime.
    """
    identity = machines.leave()
    MACHINES.pop(identity, None)
    environment = machines.environment
    by_role = {} if machines.configuration.family else machines.configuration.by_role
    # A family's sandboxes have the users by which `ssh` logs in. Others have users that own their files, or no login.
    logins = {role: " --user root" for role, machine in by_role.items() if machine.user != "agent"}
    print(
        f"provisioner ssh {identity}{logins.get('primary', '')}    "
        f"# until {environment.expires_at:%Y-%m-%d %H:%M} UTC; "
        f"ends with: inspect sandbox cleanup provisioner {identity}"
    )
    for role in environment.roles:
        if role != "primary":
            print(f"provisioner ssh {identity} --machine {role}{logins.get(role, '')}")


class CleanUpError(click.ClickException):
    """Says on Inspect's command line what failed, why and what to do, and gives its exit code.

    Args:
        lines: what is printed.
        exit_code: that of provisioner's own command line.
    """

    def __init__(self, lines: Iterable[str], exit_code: int) -> None:
        super().__init__("\n".join(printable(line) for line in lines))
        self.exit_code = exit_code  # type: ignore[misc]  # read from the instance (click.Command.main)

    @classmethod
    def of(cls, error: ProvisionerError) -> CleanUpError:
        """Returns what to show of one error."""
        return cls(filter(None, (error.message, hint_of(error))), error.exit_code)


def destroy_abandoned(identity: str | None) -> None:
    """Destroys the environments of evals that no running process looks after, and prints which.

    Args:
        identity: an environment's id, or its beginning or end; None for all.

    Raises:
        UsageError: there is no such environment, or a running eval uses it.
        CleanUpError: some could not be destroyed; the others are.
    """
    session = open_session(Configuration(), Origin("cleanup"))
    selected = _selected(session, identity)
    failures: dict[str, ProvisionerError] = {
        name: InfrastructureError(
            "Its record cannot be read.", hint=f"To destroy it all the same: provisioner destroy {name}"
        )
        for name in selected.damaged
    }
    for environment in selected.live:
        try:
            cloud = open_cloud(session.home, load_settings(), Where.of(environment.cloud, environment.placement))
            lifecycle.destroy(replace(session, cloud=cloud), environment)
        except Exception as error:
            unexpected = InfrastructureError(f"Unexpected {describe(error)}")
            failures[environment.id] = error if isinstance(error, ProvisionerError) else unexpected
        else:
            print(f"{environment.id} destroyed")
    for name in selected.gone:
        print(f"{name} is already gone")
    if failures:
        lines = [f"{name} is NOT destroyed: {each.message} {hint_of(each)}".rstrip() for name, each in failures.items()]
        raise CleanUpError([*lines, *STILL_THERE], next(error.exit_code for error in failures.values()))
    for name in snapshots.remove_abandoned(session):
        print(f"snapshot {name} removed")
    if identity is None:
        with best_effort(session.progress, "Removing unfinished snapshots"):  # of killed processes
            for name in SnapshotStore(session.home).remove_unfinished():
                print(f"unfinished snapshot {name} removed")
        print("No other machines of ended evals are left on this controller.")


def _selected(session: Session, identity: str | None) -> Selection:
    def is_in_use(name: str) -> bool:
        return is_locked(session.environments.lease(name))

    def is_ours(environment: Environment) -> bool:
        return environment.batch.startswith(BATCH_PREFIX)

    if identity is None:
        live = [each for each in session.environments.readable() if is_ours(each) and not is_in_use(each.id)]
        damaged = [name for name in session.environments.unreadable() if not is_in_use(name)]
        batches = {name: [entry.batch for entry in launches(session, name)] for name in damaged}
        # An environment whose record cannot be read may be of an eval, by the ledger.
        ours = [name for name, of in batches.items() if not of or any(batch.startswith(BATCH_PREFIX) for batch in of)]
        return Selection(live=live, damaged=ours)
    selection = select_for_destroy(session, [identity], everything=False)
    for environment in selection.live:
        if not is_ours(environment):
            raise UsageError(
                f"{environment.id} is not of an Inspect eval.", hint=f"provisioner destroy {environment.id}"
            )
        if is_in_use(environment.id):
            raise UsageError(f"A running eval uses {environment.id}.")
    return selection
