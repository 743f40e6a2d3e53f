"""Lists the steps of the self-test with what each costs at most, runs them up to the first failure, and reports them.

The report can be sent to strangers: it names no account, user or key.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from decimal import Decimal
from functools import partial
from pathlib import Path

from provisioner.base.clock import TEARDOWN
from provisioner.base.errors import BudgetError, ProvisionerError
from provisioner.base.models import Destination, Record
from provisioner.base.printable import printable_lines
from provisioner.base.progress import Progress
from provisioner.costs.prices import MICRO, cost, dollars, hourly
from provisioner.environment.planning import Forecast, forecast
from provisioner.family.loader import TaskFamily, load_family
from provisioner.selftest import checks
from provisioner.selftest.checks import ALL_COMBINATIONS, Combination
from provisioner.session import Session

FAMILY = Path(__file__).parent / "family" / "selftest"
# Short, as reservations count all of it, at full load. In a crowd, all of them are reserved at once.
TTL, CROWD_TTL, BUILDER_TTL = timedelta(minutes=20), timedelta(minutes=12), timedelta(hours=1)
# How long machines live in the end, if nothing is slow. Those of a crowd are neither started nor scored.
LIFE, CROWD_LIFE, BUILDER_LIFE = timedelta(minutes=8), timedelta(minutes=6), timedelta(minutes=15)
REBOOT_LIFE, EXPIRY_LIFE = timedelta(minutes=10), timedelta(minutes=12)
# No step begins that would usually take what is spent over the limit. What is spent, and what is reserved for machines
# that run, never exceeds the budget: a crowd reserves three times of what it costs.
LIMIT_USD, BUDGET_USD = Decimal(1), Decimal(2)
# What a machine may send. It sends some megabytes: requests for packages, and answers to the controller.
EGRESS_GB = Decimal("0.1")
# A primary and an aux VM's base image, and the family's.
BUILDERS = 3
CROWD = 30


def steps(
    sessions: Mapping[bool, Session],
    destination: Destination,
    combinations: Sequence[Combination] = ALL_COMBINATIONS,
    crowd: int = CROWD,
) -> list[Step]:
    """Returns the steps, in their order.

    Args:
        sessions: those that do not (False) and do (True) ask the spot market first.
        destination: what environments with an allowlist may reach: something that answers from anywhere.
        combinations: the kinds of environments to bring up.
        crowd: how many environments to bring up at once.

    Raises:
        UnavailableError: a price is not known.
    """
    session = sessions[False]
    family = load_family(FAMILY)
    estimate = forecast(session, family, "offline")
    one = estimate.worst_micro_usd
    crowded = replace(session, ttl=CROWD_TTL)
    builders = 0 if estimate.image else BUILDERS * estimate.builder_micro_usd
    return [
        Step("controller and account", "asks for credentials, rights and roles", 0, partial(checks.ready, session)),
        Step(
            "images",
            "builds the base images and the self-test's image, in up to three machines, unless they exist",
            builders,
            partial(checks.build, session, family),
            # Builders are of one type, so that their costs are as their times.
            math.ceil(builders * (BUILDER_LIFE / (session.builder_ttl + TEARDOWN))),
        ),
        Step(
            "rights",
            "asks EC2 for dry runs of all that is done with a machine, its network and its group",
            one,
            partial(checks.rights, session, family),
            _usual(estimate, LIFE),
        ),
        *(_live(sessions[each.spot], family, each, destination) for each in combinations),
        Step(
            "reboot",
            "reboots a machine, which must keep its host key and its time limit",
            one,
            partial(checks.reboot, session, family),
            _usual(estimate, REBOOT_LIFE),
        ),
        Step(
            "expiry",
            "sets an environment's end to a minute from now, and waits until the cloud has ended it",
            one,
            partial(checks.expiry, session, family),
            _usual(estimate, EXPIRY_LIFE),
        ),
        Step(
            f"{crowd} at once",
            f"brings up {crowd} environments at once, and destroys them",
            crowd * forecast(crowded, family, "offline").worst_micro_usd,
            partial(checks.crowd, crowded, family, crowd),
            crowd * _usual(estimate, CROWD_LIFE),
        ),
        Step(
            "nothing left",
            "looks for what is left, and removes the image",
            0,
            partial(checks.nothing_left, session, family),
        ),
    ]


def _live(session: Session, family: TaskFamily, combination: Combination, destination: Destination) -> Step:
    estimate = forecast(session, family, combination.task, allowlist=combination.internet == "allowlist")
    # What is not known before the image is built: a machine more.
    machines = 2 if combination.aux and "aux" not in estimate.machines else 1
    return Step(
        combination.name,
        "brings up an environment, proves its isolation, scores and destroys it",
        machines * estimate.worst_micro_usd,
        partial(checks.live, session, family, combination, destination),
        machines * _usual(estimate, LIFE),
    )


def _usual(estimate: Forecast, life: timedelta) -> int:
    """What an environment costs that lives so long where it was tried first, in millionths of a US dollar."""
    return cost(hourly(estimate.lines), life) if estimate.lines else 0


# Of what AWS's messages quote: amazon resource names, account numbers, access key ids (IAM user guide, "Identifiers").
_PRIVATE = (
    (re.compile(r"\barn:aws[a-z-]*:[^\s\"']+"), "ARN"),
    (re.compile(r"\b(?:AKIA|ASIA|AROA|AIDA)[A-Z0-9]{12,}\b"), "KEY"),
    (re.compile(r"(?<!\d)\d{12}(?!\d)"), "ACCOUNT"),
    (re.compile(r"(?<![\d.])(?!10\.|127\.|169\.254\.)(?:\d{1,3}\.){3}\d{1,3}(?![\d.])"), "ADDRESS"),
)


def report(outcome: Outcome, facts: Mapping[str, str]) -> str:
    """Returns the text.

    Args:
        facts: names and values of what it ran with, such as versions and the region.
    """
    lines = [f"{name}: {value}" for name, value in facts.items()]
    lines += ["", *(_line(each.name, each.found, each.seconds, each.passed) for each in outcome.results)]
    if failure := outcome.failure:
        lines += ["", f"{type(failure).__name__}, exit code {failure.exit_code}: {failure.message}"]
        lines += [text for text in (failure.hint, failure.details) if text]
    return without_names(printable_lines("\n".join(lines))) + "\n"


def without_names(text: str) -> str:
    """Returns the text with placeholders for account numbers, ARNs, key ids and public addresses."""
    for pattern, placeholder in _PRIVATE:
        text = pattern.sub(placeholder, text)
    return text


def _line(name: str, found: str, seconds: float, passed: bool) -> str:
    return f"{'passed' if passed else 'FAILED'} {seconds:6.1f} s  {name}: {found}"


@dataclass(frozen=True)
class Step:
    """One step.

    Args:
        name: a few words.
        does: what it does, for an operator who decides whether it may.
        worst_micro_usd: its worst-case cost, in millionths of a US dollar: what is reserved for it, if all its
            machines run at full load until their time limits.
        work: does it, and returns what was found. Raises a ProvisionerError for a failure.
        usual_micro_usd: what it costs if nothing is slow, in millionths of a US dollar.
    """

    name: str
    does: str
    worst_micro_usd: int
    work: Callable[[], str]
    usual_micro_usd: int = 0

    @property
    def costs(self) -> str:
        """The costs in words."""
        if not self.worst_micro_usd:
            return "nothing"
        return f"usually {self.usual_micro_usd / MICRO:.4f} USD, at most {self.worst_micro_usd / MICRO:.4f} USD"


class StepResult(Record):
    """A step that was done.

    Args:
        found: what it found; of the step that failed, what was wrong.
    """

    name: str
    found: str
    seconds: float
    passed: bool


@dataclass(frozen=True)
class Outcome:
    """What came of a self-test.

    Args:
        results: of the steps that were begun, in their order.
        failure: what stopped it; None if every step passed.
    """

    results: tuple[StepResult, ...]
    failure: ProvisionerError | None


def run_steps(
    steps: Sequence[Step],
    progress: Progress,
    spent: Callable[[], int] = lambda: 0,
    limit_micro_usd: int | None = None,
) -> Outcome:
    """Runs the steps, and says before each what it does and costs.

    Args:
        spent: returns what the ledger counts so far, in millionths of a US dollar.
        limit_micro_usd: no step begins that would usually exceed it; None for no limit but the budget of each launch.
    """
    results: list[StepResult] = []
    for number, step in enumerate(steps, 1):
        progress.note(f"{number} of {len(steps)}, {step.name}: {step.does} (costs {step.costs})")
        begin = time.monotonic()
        failure: ProvisionerError | None = None
        try:
            if limit_micro_usd is not None and step.usual_micro_usd:
                _require_room(step, spent(), limit_micro_usd)
            found = step.work()
        except ProvisionerError as error:
            failure, found = error, error.message
        seconds = round(time.monotonic() - begin, 1)
        results.append(StepResult(name=step.name, found=found, seconds=seconds, passed=failure is None))
        progress.note(f"{'passed' if failure is None else 'stopped'} after {seconds:.0f} s: {found}")
        if failure is not None:
            return Outcome(tuple(results), failure)
    return Outcome(tuple(results), None)


def _require_room(step: Step, spent: int, limit_micro_usd: int) -> None:
    """Raises BudgetError if a step would usually exceed the limit."""
    if spent + step.usual_micro_usd > limit_micro_usd:
        raise BudgetError(
            f"The steps before have cost {dollars(spent)}, and this one usually costs "
            f"{dollars(step.usual_micro_usd)}: more than {dollars(limit_micro_usd)} together.",
            hint="Machines took longer than they usually do; the report says how long. Run the check again: what "
            "is built is not built again.",
        )
