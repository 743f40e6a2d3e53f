"""Ends the sample of a lost machine as an error, whatever its tools, agent or solver make of the call that failed."""

from __future__ import annotations

import contextlib
from typing import NoReturn

from inspect_ai.util import SandboxUnavailableError, background

from provisioner.errors import MachineLostError, TaskError


class LossError(MachineLostError):
    """A sample's machine is lost: this call in it fails, and so does every later one.

    Args:
        message: how it was noticed, and what the cloud says.
        is_agents_doing: whether a task family's agent lost it. The score at the end decides then, never an error, as
            Inspect may try a sample with an error again.
    """

    def __init__(self, message: str, *, is_agents_doing: bool) -> None:
        super().__init__(message)
        self.is_agents_doing = is_agents_doing


class NotUpError(TaskError):
    """What runs in a sample's machine is not up. The machine is not lost for that."""


def unavailable(loss: LossError, told: str = "") -> SandboxUnavailableError:
    """Returns Inspect's error for a call in a lost machine, and ends the current sample with an error that says why.

    Inspect makes a tool error of an exception that a tool raises for want of a sandbox, and the model continues. What a
    background function of the sample raises ends the sample. The sample continues only if its agent lost the machine.

    Args:
        told: what the model is told; empty for the whole reason.
    """
    if not loss.is_agents_doing:
        _end_sample(loss.message)
    return SandboxUnavailableError(told or loss.message)


def _end_sample(reason: str) -> None:
    async def fail() -> NoReturn:
        raise SandboxUnavailableError(reason)

    # Inspect refuses before the first solver, while it scores, and outside of samples. No tool takes the call's own
    # error there.
    with contextlib.suppress(RuntimeError):
        background(fail)
