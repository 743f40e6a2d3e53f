"""Says what came of an environment, from its record: which part failed, and how. Pure."""

from __future__ import annotations

import json

from provisioner.family.scores import NO_FAILURES
from provisioner.models import Environment, ScoreLogEntry
from provisioner.printable import beginning

# Stands for the console of each machine.
CONSOLES = "console"
# The phases of an environment's life (lifecycle.py and run.py) and of a build (provisioning.py), with the logs of each.
LOGS_OF_PHASES: dict[str, tuple[str, ...]] = {
    "build step": ("shell",),
    "install": ("install",),
    "setup": ("setup",),
    "create": ("terraform",),
    "boot": (CONSOLES, "terraform"),
    "isolation": (CONSOLES,),
    "start": ("start", "settle_home"),
    "first score": ("intermediate_score",),
    "agent": ("agent",),
    "score": ("score", "aggregate_scores", "intermediate_score"),
    "tests": ("pytest",),
    "teardown": ("teardown",),
}
# Of the score log; --json has all of it.
SHOWN_SCORES = 20
SHOWN_CHARACTERS = 1000


def failed_parts(environment: Environment) -> tuple[str, ...]:
    """Returns the names of the logs of what failed; none if nothing did, or if that is not known."""
    if environment.breakdown:
        parts = LOGS_OF_PHASES.get(environment.breakdown.phase, ())
        consoles = [f"{CONSOLES}-{role}" for role in environment.machines]
        return tuple(name for part in parts for name in (consoles if part == CONSOLES else [part]))
    if environment.outcome and environment.outcome.status not in NO_FAILURES:
        return LOGS_OF_PHASES["score"]
    if environment.agent_exit_code:
        return LOGS_OF_PHASES["agent"]
    return ()


def described(environment: Environment) -> list[str]:
    """Returns lines about what came of an environment: intermediate scores, agent, outcome, and what failed."""
    lines = [_score(entry) for entry in environment.score_log[-SHOWN_SCORES:]]
    if len(environment.score_log) > len(lines):
        lines.insert(0, f"{len(environment.score_log)} intermediate scores, of which the last {len(lines)}:")
    if environment.agent_ended_at:
        code = environment.agent_exit_code
        how = (
            "without an exit code: its time ran out, or its machine restarted" if code is None else f"exit code {code}"
        )
        lines.append(f"agent: ended at {environment.agent_ended_at:%H:%M:%S} UTC, {how}")
    if outcome := environment.outcome:
        score = "no score" if outcome.score is None else f"score {outcome.score:g}"
        lines.append(f"outcome: {outcome.status}, {score}, at {outcome.scored_at:%H:%M:%S} UTC")
        lines += [f"  {text}" for text in (outcome.message, *outcome.details.splitlines()) if text]
    if breakdown := environment.breakdown:
        during = f" in the phase {breakdown.phase}" if breakdown.phase else ""
        lines.append(f"failed{during} at {breakdown.at:%H:%M:%S} UTC: {breakdown.message}")
    return lines


def _score(entry: ScoreLogEntry) -> str:
    score = "no score" if entry.score is None else f"{entry.score:g}"
    said = {"message": entry.message, "details": entry.details}
    more = [
        f", {name} {beginning(json.dumps(value, ensure_ascii=False), SHOWN_CHARACTERS)}"
        for name, value in said.items()
        if value
    ]
    return f"scored after {entry.elapsed_seconds:.0f} s: {score}{''.join(more)}"
