"""Renders the report. The page forbids itself everything but its own style and script, which its policy names by hash.

All that families, machines and agents say is text: the templates escape it, and what cannot be printed is replaced.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from jinja2 import Environment as Templates
from jinja2 import FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from provisioner.base.clock import format_duration
from provisioner.base.config import data_directory
from provisioner.base.printable import beginning, printable
from provisioner.batch.records import Batch
from provisioner.batch.report.charts import costs, ends, matrix
from provisioner.batch.report.evidence import Evidence
from provisioner.batch.report.runs import first_part, run_views
from provisioner.batch.results import OUTCOMES, Row
from provisioner.batch.suite import Suite
from provisioner.costs.prices import MICRO

DIRECTORY = "report"
PAGE = "page.html.j2"
# How much of a name that a family or an agent has, and of any other fact, is shown.
NAME_CHARACTERS = 120
FACT_CHARACTERS = 2000
# How much of a command or a submission is shown, in bytes of HTML.
COMMAND_BYTES = 2000
# How many different machines, images and versions are named.
MAX_NAMED = 20
FAILED = ("task_failed", "agent_failed", "infrastructure_failed")


def render(batch: Batch, rows: Sequence[Row], evidence: Mapping[str, Evidence]) -> str:
    """Returns the page as HTML.

    Args:
        rows: one for each run that has ended.
        evidence: what was kept of runs, by their keys.
    """
    directory = data_directory("templates") / DIRECTORY
    templates = Templates(
        loader=FileSystemLoader(directory),
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {"name": _name, "broken": _broken, "part": first_part}
    style, script = ((directory / name).read_text() for name in ("style.css", "script.js"))
    scores = matrix(rows)
    return templates.get_template(PAGE).render(
        title=batch.suite.name,
        line=_line(batch, rows),
        style=Markup(style),  # noqa: S704 - our own file
        script=Markup(script),  # noqa: S704
        policy=policy(style, script),
        totals=totals(rows, len(batch.runs)),
        facts=how_it_ran(batch, rows, evidence),
        agents=agents(batch.suite, rows),
        matrix=scores,
        ticks=scores.axis.ticks,
        ends=ends(rows),
        outcomes=Counter(row.outcome for row in rows),
        retried=sum(bool(row.retried) for row in rows),
        costs=costs(rows),
        runs=run_views(rows, evidence),
        rows=len(rows),
        labels=OUTCOMES,
    )


def policy(style: str, script: str) -> str:
    """Returns the page's Content Security Policy: nothing is loaded, and only this style and this script count."""
    return (
        f"default-src 'none'; style-src {_hash_of(style)}; script-src {_hash_of(script)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


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


def how_it_ran(batch: Batch, rows: Sequence[Row], evidence: Mapping[str, Evidence]) -> dict[str, str]:
    """Returns what a reader has to know to run it again, by what it is; empty facts are left out."""
    suite = batch.suite
    known = evidence.values()
    facts = {
        "families": _different(f"{row.family} {row.family_version}".strip() for row in rows),
        "repetitions": str(suite.repetitions),
        "time limits": f"agent {format_duration(suite.limits.agent_limit)}, environment {suite.limits.ttl}",
        "budget": f"{suite.budget} USD" if suite.budget is not None and suite.is_billed else "",
        "cloud": suite.cloud + (", spot instances first" if suite.spot else ""),
        "regions": _different(row.region for row in rows) or ", ".join(suite.regions),
        "machine types": _different(f"{role}: {kind}" for row in rows for role, kind in row.machine_types.items()),
        "machines": _different(f"{role}: {size}" for kept in known for role, size in kept.machines.items()),
        "versions": _different(f"{name} {value}" for kept in known for name, value in kept.versions.items()),
        "internet": _internet(evidence, suite),
        "isolation": _isolation(evidence),
        "images": _different(image for row in rows for image in row.images.values()),
    }
    return {name: fact for name, fact in facts.items() if fact}


def agents(suite: Suite, rows: Sequence[Row]) -> list[tuple[str, str, Markup]]:
    """Returns the agents with their commands and the submissions with their texts: name, what it is, and that.

    The hash of an agent's files stands beside its command.
    """
    commands = []
    for agent in suite.agents:
        files = _different(row.agent_files for row in rows if row.agent == agent.name)
        commands.append(
            (agent.name, f"command; files {files or 'not known'}", first_part(agent.command, COMMAND_BYTES))
        )
    return commands + [(each.name, "submission", first_part(each.text, COMMAND_BYTES)) for each in suite.submissions]


def _line(batch: Batch, rows: Sequence[Row]) -> str:
    """Returns the line below the title: what a reader wants to know first of how it ran."""
    return " · ".join(
        [
            batch.id,
            f"{batch.created_at:%Y-%m-%d}",
            f"{batch.suite.cloud} machines",
            f"agents limited to {format_duration(batch.suite.limits.agent_limit)}",
            f"provisioner {_different([batch.version, *(row.version for row in rows)])}",
        ]
    )


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
    proven = [proof for proof in known if proof["proven"]]
    probes = sum(proof["probes"] for proof in proven)
    return f"proven in {len(proven)} of {len(known)} runs, by {probes} probes" if known else ""


def _different(values: Iterable[str]) -> str:
    different = list(dict.fromkeys(value for value in values if value))
    more = f" and {len(different) - MAX_NAMED} more" if len(different) > MAX_NAMED else ""
    return ", ".join(different[:MAX_NAMED]) + more


def _hash_of(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _shown(value: object) -> object:
    """Makes text that the template shows printable, on one line and bounded; not markup, which is so already."""
    return beginning(printable(value), FACT_CHARACTERS) if type(value) is str else value


def _name(text: str) -> str:
    return beginning(printable(text), NAME_CHARACTERS)


def _broken(text: str) -> Markup:
    """Returns a name as HTML, whose lines may break where its parts end; not for attributes."""
    return Markup(re.sub("([/_])", r"\1<wbr>", str(escape(_name(text)))))  # noqa: S704 - escaped just before
