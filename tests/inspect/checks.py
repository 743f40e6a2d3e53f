"""Inspect's own checks of a sandbox."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
from inspect_ai.util import ExecResult, SandboxEnvironment
from inspect_ai.util._sandbox import self_check

CHECKS = [name for name in dir(self_check) if name.startswith("test_")]
# It gives adduser ten seconds, in case it asks for input. A busy host's emulated CPU may need them for the work.
ADDS_A_USER = "test_exec_as_user"


async def run_check(sandbox: SandboxEnvironment, check: str) -> None:
    """Runs one of the checks."""
    with pytest.MonkeyPatch.context() as patch:
        if check == ADDS_A_USER:
            patch.setattr(sandbox, "exec", partial(_without_limit, sandbox.exec))
        await getattr(self_check, check)(sandbox)


async def _without_limit(
    execute: Callable[..., Awaitable[ExecResult[str]]], *command: Any, **options: Any
) -> ExecResult[str]:
    # pytest's own limit ends a command that hangs.
    return await execute(*command, **{**options, "timeout": None})
