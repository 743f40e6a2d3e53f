"""Runs a function for all machines of an environment at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

from provisioner.models import Role

T = TypeVar("T")


def on_all_machines(roles: Mapping[Role, object], work: Callable[[Role, threading.Event], T]) -> dict[Role, T]:
    """Runs `work` for all machines at once. Raises the first failure, and sets the event so that the others stop."""
    cancelled = threading.Event()
    pool = ThreadPoolExecutor(max_workers=len(roles))
    try:
        futures = {role: pool.submit(work, role, cancelled) for role in roles}
        wait(futures.values(), return_when="FIRST_EXCEPTION")
        for future in futures.values():
            if future.done():
                future.result()
        return {role: future.result() for role, future in futures.items()}
    except BaseException:
        cancelled.set()
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
