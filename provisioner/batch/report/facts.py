"""Says how a batch was run: suite, agents' commands, limits, cloud, machines and versions. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

from markupsafe import Markup

from provisioner.batch.records import Batch
from provisioner.batch.report.evidence import Evidence
from provisioner.batch.report.texts import first_part
from provisioner.batch.results import Row
from provisioner.batch.suite import Suite
from provisioner.costs.prices import MICRO
from provisioner.ttl import format_duration

COMMAND_BYTES = 2000
# How many different machines, images and versions are named.
MAX_NAMED = 20
FAILED = ("task_failed", "agent_failed", "infrastructure_failed")


def totals(rows: Sequence[Row], planned: int) -> dict[str, str]:
    """Returns the figures at the top of the page, by what they are. Costs are left out if the cloud bills nothing."""
    begin = min((row.started_at for row in rows if row.started_at), default=None)
    end = max((row.ended_at for row in rows if row.ended_at), default=None)
    outcomes = Counter[str](row.outcome for row in rows)
    cost = sum(row.cost_micro_usd for row in rows)
    figures = {
        "runs": str(len(rows)) if len(rows) == planned else f"{len(rows)} of {planned}",
        "tasks": str(len({(row.family, row.task) for row in rows})),
        "agents": str(len({row.agent for row in rows})),
        "scored": str(outcomes["scored"]),
        "timed out": str(outcomes["timed_out"]),
        "failed": str(sum(outcomes[name] for name in FAILED)),
        "time": format_duration(end - begin) if begin and end else "-",
    }
    if unrun := outcomes["over_budget"] + outcomes["cancelled"]:
        figures["not run"] = str(unrun)
    return figures | ({"cost": f"{cost / MICRO:.2f} USD"} if cost else {})


def line(batch: Batch, rows: Sequence[Row]) -> str:
    """Returns the line below the title: what a reader wants to know first of how it ran."""
    suite = batch.suite
    return " · ".join(
        [
            batch.id,
            f"{batch.created_at:%Y-%m-%d}",
            f"{suite.cloud} machines",
            f"agents limited to {format_duration(suite.limits.agent_limit)}",
            f"provisioner {_different([batch.version, *(row.version for row in rows)])}",
        ]
    )


def how_it_ran(
    batch: Batch, rows: Sequence[Row], evidence: Mapping[str, Evidence], made_at: datetime
) -> dict[str, str]:
    """Returns what a reader has to know to run it again, by what it is; empty facts are left out."""
    suite = batch.suite
    sizes = (f"{role}: {size}" for known in evidence.values() for role, size in known.machines.items())
    types = (f"{role}: {kind}" for row in rows for role, kind in row.machine_types.items())
    images = (image for row in rows for image in row.images.values())
    places = (f"{row.cloud} {row.region}" for row in rows if row.region)
    versions = [batch.version, *(row.version for row in rows)]
    facts = {
        "suite": suite.name,
        "batch": batch.id,
        "began": f"{batch.created_at:%Y-%m-%d %H:%M} UTC",
        "page made": f"{made_at:%Y-%m-%d %H:%M} UTC",
        "families": _different(f"{row.family} {row.family_version}".strip() for row in rows),
        "repetitions": str(suite.repetitions),
        "time limits": f"agent {format_duration(suite.limits.agent_limit)}, environment {suite.limits.ttl}",
        "at once": str(suite.concurrency),
        "retries": str(suite.retries),
        "budget": f"{suite.budget} USD" if suite.budget is not None and suite.is_billed else "",
        "cloud": suite.cloud + (", spot instances first" if suite.spot else ""),
        "regions": _different(places) or ", ".join(suite.regions),
        "machine types": _different(types),
        "machines": _different(sizes),
        "internet": _internet(evidence, suite),
        "isolation": _isolation(evidence),
        "images": _different(images),
        "provisioner": _different(versions),
    }
    return {name: fact for name, fact in facts.items() if fact}


def agents(suite: Suite, rows: Sequence[Row]) -> list[tuple[str, str, Markup]]:
    """Returns the agents with their commands and the submissions with their texts: name, what it is, and that.

    The hash of an agent's files stands beside its command.
    """
    names = [agent.name for agent in suite.agents]
    files = {name: _different(row.agent_files for row in rows if row.agent == name) for name in names}
    return [
        *(
            (agent.name, f"command; files {files[agent.name] or 'not known'}", first_part(agent.command, COMMAND_BYTES))
            for agent in suite.agents
        ),
        *((entry.name, "submission", first_part(entry.text, COMMAND_BYTES)) for entry in suite.submissions),
    ]


def _internet(evidence: Mapping[str, Evidence], suite: Suite) -> str:
    """Says what machines reached outside, of those whose records are known."""
    known = Counter(kept.internet for kept in evidence.values() if kept.internet is not None)
    offline = f"none but {', '.join(suite.allow)}" if suite.allow else "none"
    if not known:
        return ""
    if not known[True]:
        return offline
    return "all of it" if not known[False] else f"{known[True]} runs all of it, {known[False]} {offline}"


def _isolation(evidence: Mapping[str, Evidence]) -> str:
    """Says of how many runs the isolation is proven, of those whose proofs are known."""
    known = [kept.isolation for kept in evidence.values() if kept.isolation]
    if not known:
        return ""
    proven = [proof for proof in known if proof["proven"]]
    return f"proven in {len(proven)} of {len(known)} runs, by {sum(proof['probes'] for proof in proven)} probes"


def _different(values: Iterable[str]) -> str:
    different = list(dict.fromkeys(value for value in values if value))
    more = f" and {len(different) - MAX_NAMED} more" if len(different) > MAX_NAMED else ""
    return ", ".join(different[:MAX_NAMED]) + more
