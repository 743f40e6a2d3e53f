"""Combines environments that start at about the same time into one stack, so that one `terraform apply` creates them.

Starting a Terraform provider costs the controller more than the environments do. Callers wait here until one more
Terraform may run; all those that are waiting by then share an apply.
"""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, replace

from provisioner.base.errors import CapacityError, Interrupted, ProvisionerError, TerraformError
from provisioner.base.models import Environment
from provisioner.machines.create import create_machines
from provisioner.session import Session
from provisioner.store.environments import new_id

# The more environments an apply creates, the longer the first of them waits for the last.
MAX_PER_STACK = 25
# Runs that begin together ask for their machines within this time of one another.
GATHERING_SECONDS = 1.0
# Memory that the AWS provider's processes take, as measured.
TERRAFORM_GIB = 0.6


def terraform_slots(cores: int, memory_gib: float) -> int:
    """Returns how many Terraform processes a host of this size can run at once."""
    return max(1, min(2 * cores, int(memory_gib / TERRAFORM_GIB)))


def host_slots() -> int:
    """Returns how many Terraform processes this host can run at once."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return terraform_slots(os.cpu_count() or 1, memory_gib)


@dataclass(frozen=True, eq=False)
class _CreateRequest:
    """A caller's request for machines; its result is the environment with its machines, or the error of the apply."""

    environment: Environment
    session: Session
    result: Future[Environment]


class ApplyBatcher:
    """Creates the machines of environments, as many environments in one apply as are waiting for it.

    Args:
        label: the beginning of the stacks' names.
        slots: how many Terraform processes may run at once.
    """

    def __init__(self, label: str, slots: int) -> None:
        self._label = label
        self._slots = slots
        self._waiting: list[_CreateRequest] = []
        self._mutex = threading.Lock()
        self._threads = 0

    def create(self, session: Session, environment: Environment) -> Environment:
        """Creates the machines of a recorded environment, and returns it once they exist.

        Raises:
            ProvisionerError: they could not be created. `destroy` finds what exists by then.
        """
        request = _CreateRequest(environment, session, Future())
        with self._mutex:
            self._waiting.append(request)
            if self._threads < self._slots:
                self._threads += 1
                threading.Thread(target=self._serve, name="apply-batcher", daemon=True).start()
        # A run that is told to stop waits, too: until the apply ends, what it creates cannot be found.
        return request.result.result()

    def _serve(self) -> None:
        """Serves requests, one stack after the other, until none is waiting."""
        while True:
            self._gather()
            with self._mutex:
                requests = self._next_requests()
                if not requests:
                    self._threads -= 1
                    return
            try:
                self._apply(requests)
            except BaseException as error:
                for request in requests:
                    if not request.result.done():
                        request.result.set_exception(error)

    def _gather(self) -> None:
        """Waits until a second passes without another request, or a stack is full."""
        count = -1
        while True:
            with self._mutex:
                if len(self._waiting) in (0, count) or len(self._waiting) >= MAX_PER_STACK:
                    return
                count = len(self._waiting)
            time.sleep(GATHERING_SECONDS)

    def _next_requests(self) -> list[_CreateRequest]:
        """Removes and returns the waiting requests for the first request's cloud and place that fit in one stack."""
        if not self._waiting:
            return []
        cloud = self._waiting[0].session.cloud
        requests = [request for request in self._waiting if request.session.cloud is cloud][:MAX_PER_STACK]
        self._waiting = [request for request in self._waiting if request not in requests]
        return requests

    def _apply(self, requests: list[_CreateRequest]) -> None:
        """Creates what the requests are for, and gives each its result, or its error if the others can go on."""

        def check() -> None:
            if all(_is_stopped(request.session) for request in requests):
                raise Interrupted("All runs of this stack have been told to stop.")

        session = replace(requests[0].session, check=check)
        stack = new_id(self._label, None)
        pending = _recorded(session, requests, stack)
        while pending:
            try:
                created = create_machines(session, [environment for _, environment in pending.values()])
            except (TerraformError, CapacityError) as error:
                failed = error.environments & pending.keys()
                if not failed or failed == pending.keys():
                    raise
                # The others are in Terraform's state already: another apply completes them soon.
                for name in failed:
                    pending.pop(name)[0].result.set_exception(error)
                pending = {
                    name: (request, session.environments.reread(environment))
                    for name, (request, environment) in pending.items()
                }
                continue
            for environment in created:
                pending[environment.id][0].result.set_result(environment)
            return


def _is_stopped(session: Session) -> bool:
    try:
        session.check()
    except Interrupted:
        return True
    return False


def _recorded(
    session: Session, requests: list[_CreateRequest], stack: str
) -> dict[str, tuple[_CreateRequest, Environment]]:
    """Records the stack of each request's environment. A request whose record is gone or damaged gets the error."""
    recorded = {}
    for request in requests:
        try:
            environment = session.environments.update(request.environment, stack=stack)
        except (ProvisionerError, OSError) as error:
            request.result.set_exception(error)
        else:
            recorded[environment.id] = (request, environment)
    return recorded
