"""The command `aws check`: a staged self-test on the operator's own account."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from provisioner.base.clock import now
from provisioner.base.errors import UsageError
from provisioner.cli.command import progress
from provisioner.cli.options import parse_region
from provisioner.cli.output import Result
from provisioner.cli.sessions import session
from provisioner.cli.terminal import hint_of
from provisioner.clouds.registry import Where
from provisioner.costs.prices import MICRO, micro_usd
from provisioner.environment.allowlist import parse_destination, resolve
from provisioner.selftest.steps import (
    BUDGET_USD,
    BUILDER_TTL,
    EGRESS_GB,
    LIMIT_USD,
    TTL,
    Outcome,
    Step,
    report,
    run_steps,
    steps,
)
from provisioner.session import Session
from provisioner.store.files import write_atomically
from provisioner.version import __version__

DESTINATION = "checkip.amazonaws.com:443"
DIRECTORY = "self-tests"


def check(
    *,
    yes: Annotated[bool, typer.Option("--yes", help="Begin without asking.")] = False,
    region: Annotated[
        str | None, typer.Option("--region", help="Region to test. Default: as for `up`.", parser=parse_region)
    ] = None,
) -> Result:
    """Tests on this account what provisioner does there, step by step, usually for less than a dollar.

    It lists the steps with what each does and costs, stops at the first failure, and clears away what it made.
    """
    on_demand, spot = (_session(region, spot=spot) for spot in (False, True))
    # Both spend from one budget, which is that of this run alone.
    sessions = {False: on_demand, True: replace(spot, spending=on_demand.spending)}
    planned = steps(sessions, resolve([parse_destination(DESTINATION)])[0])
    _agree(planned, asked=not yes)
    outcome = run_steps(planned, progress(), partial(_spent, on_demand), micro_usd(LIMIT_USD))
    return _result(sessions[False], outcome)


def _session(region: str | None, *, spot: bool) -> Session:
    opened = session(where=Where("aws", (region,) if region else (), spot=spot))
    opened.cloud.egress_gb = EGRESS_GB
    spending = opened.spending.model_copy(update={"budget": BUDGET_USD})
    return replace(opened, ttl=TTL, builder_ttl=BUILDER_TTL, spending=spending)


def _spent(opened: Session) -> int:
    """What this run has cost so far, in millionths of a US dollar, with what is reserved for what still runs."""
    command = opened.spending.command
    return sum(entry.counted_micro_usd for entry in opened.ledger.entries() if entry.command == command)


def _agree(planned: Sequence[Step], *, asked: bool) -> None:
    """Shows the steps and asks whether to begin; raises UsageError without a yes."""
    lines = [f"{number:3} {step.name}: {step.does} ({step.costs})" for number, step in enumerate(planned, 1)]
    total = sum(step.usual_micro_usd for step in planned) / MICRO
    lines += [
        f"All of it usually costs {total:.4f} USD. No step begins that would usually take it over {LIMIT_USD} USD.",
        f"What is spent, with all that running machines may still cost, never exceeds {BUDGET_USD} USD.",
    ]
    typer.echo("\n".join(lines), err=True)
    if not asked:
        return
    if not sys.stdin.isatty():
        raise UsageError(
            "`aws check` asks before it begins, and standard input is not a terminal.",
            hint="--yes begins without asking.",
        )
    if not typer.confirm("Begin?", err=True):
        raise UsageError("Nothing was done.")


def _result(opened: Session, outcome: Outcome) -> Result:
    path = opened.home.root / DIRECTORY / f"{now():%Y%m%dT%H%M%SZ}.txt"
    path.parent.mkdir(mode=0o700, exist_ok=True)
    facts = {"provisioner": __version__, "python": platform.python_version(), "system": platform.platform()}
    write_atomically(path, report(outcome, {**facts, "region": opened.cloud.region}))
    data = {
        "passed": outcome.failure is None,
        "steps": [each.model_dump(mode="json") for each in outcome.results],
        "report": str(path),
    }
    if outcome.failure is None:
        return Result(data, f"All {len(outcome.results)} steps passed. {path} has them.")
    return Result(data, _explained(outcome, path), outcome.failure.exit_code)


def _explained(outcome: Outcome, path: Path) -> str:
    failure, failed = outcome.failure, outcome.results[-1]
    assert failure is not None
    lines = [f"Stopped at the step {failed.name}: {failure.message}"]
    lines += [text for text in (failure.details, hint_of(failure)) if text]
    lines.append("If the account is set up as docs/how-to/first-hour-on-aws.md says, this is news to us:")
    return "\n".join([*lines, f"please open an issue with {path}, which names no account and no key."])
