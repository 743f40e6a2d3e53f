"""Creates environments that start together in one stack: a provider's start costs the controller more than they do.

Whoever wants machines waits here until a Terraform may run; all that wait by then go into one apply.
"""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, replace

from provisioner.errors import CapacityError, Interrupted, TerraformError
from provisioner.machines.create import create_machines
from provisioner.models import Environment
from provisioner.session import Session
from provisioner.store.environments import new_id

# One apply takes longer the more it makes, and the first of them waits for the last.
MAX_PER_STACK = 25
# Runs that begin together come within this long of one another.
GATHERING_SECONDS = 1.0
# The AWS provider's processes, measured.
TERRAFORM_GIB = 0.6


def terraform_slots(cores: int, memory_gib: float) -> int:
    """How many Terraform processes may run at once on a host."""
    return max(1, min(2 * cores, int(memory_gib / TERRAFORM_GIB)))


def host_slots() -> int:
    """The same for this host."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return terraform_slots(os.cpu_count() or 1, memory)


@dataclass(frozen=True)
class _CreateRequest:
    environment: Environment
    session: Session
    made: Future[Environment]


class ApplyBatcher:
    """Takes requests and fulfils them stack by stack.

    Args:
        label: the beginning of the stacks' names.
        slots: how many Terraform processes may run at once.
    """

    def __init__(self, label: str, slots: int) -> None:
        self._label = label
        self._slots = slots
        self._requests: list[_CreateRequest] = []
        self._changed = threading.Condition()
        self._applies = 0

    def create(self, session: Session, environment: Environment) -> Environment:
        """Creates the machines of a recorded environment, with others or alone. Waits until they are there.

        Raises:
            ProvisionerError: what exists by then is found by destroy.
        """
        request = _CreateRequest(environment, session, Future())
        with self._changed:
            self._requests.append(request)
            if self._applies < self._slots:
                self._applies += 1
                threading.Thread(target=self._work, name="apply_batcher", daemon=True).start()
        # Even a run that is told to stop waits: what an apply is making could not be found before its end.
        return request.made.result()

    def _work(self) -> None:
        """Fulfils requests until there are none."""
        while True:
            self._gather()
            with self._changed:
                taken = self._take()
                if not taken:
                    self._applies -= 1
                    return
            self._serve(taken)

    def _gather(self) -> None:
        """Waits until no more have come for a while, or enough have."""
        count = -1
        while True:
            with self._changed:
                if len(self._requests) in (0, count) or len(self._requests) >= MAX_PER_STACK:
                    return
                count = len(self._requests)
            time.sleep(GATHERING_SECONDS)

    def _take(self) -> list[_CreateRequest]:
        """The requests of one stack: one place, one kind of root."""
        if not self._requests:
            return []
        cloud = self._requests[0].session.cloud
        taken = [request for request in self._requests if request.session.cloud is cloud][:MAX_PER_STACK]
        self._requests = [request for request in self._requests if request not in taken]
        return taken

    def _serve(self, requests: list[_CreateRequest]) -> None:
        try:
            self._apply(requests)
        except BaseException as error:
            for request in requests:
                if not request.made.done():
                    request.made.set_exception(error)

    def _apply(self, requests: list[_CreateRequest]) -> None:
        def check() -> None:
            if all(_is_stopped(request.session) for request in requests):
                raise Interrupted("All that it was for has been told to stop.")

        session = replace(requests[0].session, check=check)
        stack = new_id(self._label, None)
        left = {}
        for request in requests:
            placed = session.environments.update(request.environment, stack=stack)
            left[placed.id] = (request, placed)
        while left:
            try:
                created = create_machines(session, [placed for _, placed in left.values()])
            except (TerraformError, CapacityError) as error:
                failed = error.environments & left.keys()
                if not failed or failed == left.keys():
                    raise
                # The others are in the state: another apply is done with them soon.
                for name in failed:
                    left.pop(name)[0].made.set_exception(error)
                left = {name: (request, session.environments.reread(one)) for name, (request, one) in left.items()}
                continue
            for one in created:
                left[one.id][0].made.set_result(one)
            return


def _is_stopped(session: Session) -> bool:
    try:
        session.check()
    except Interrupted:
        return True
    return False
