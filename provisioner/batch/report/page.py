"""Renders the report. The page forbids itself everything but its own style and script, which its policy names by hash.

All that families, machines and agents say is text: the templates escape it, and what cannot be printed is replaced.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from datetime import datetime

from jinja2 import Environment as Templates
from jinja2 import FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from provisioner import package_data
from provisioner.batch.records import Batch
from provisioner.batch.report import facts
from provisioner.batch.report.evidence import Evidence
from provisioner.batch.report.matrix import ends, matrix
from provisioner.batch.report.outcomes import OUTCOMES, PARTS
from provisioner.batch.report.progress import progress
from provisioner.batch.report.runs import run_views
from provisioner.batch.report.timeline import cost_chart, timeline
from provisioner.batch.results import Row
from provisioner.printable import beginning, printable

DIRECTORY = "report"
PAGE = "page.html.j2"
# How much of a name that a family or an agent has, and of any other fact, is shown.
NAME_CHARACTERS = 120
FACT_CHARACTERS = 2000


def render(batch: Batch, rows: Sequence[Row], made_at: datetime, evidence: Mapping[str, Evidence]) -> str:
    """Returns the page as HTML.

    Args:
        rows: one for each run that has ended.
        made_at: when the page is made.
        evidence: what was kept of runs, by their keys.
    """
    directory = package_data.directory("templates") / DIRECTORY
    templates = Templates(
        loader=FileSystemLoader(directory),
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {"name": _name, "broken": _broken}
    style, script = ((directory / name).read_text() for name in ("style.css", "script.js"))
    charts, more_charts = progress(rows)
    return templates.get_template(PAGE).render(
        title=batch.suite.name,
        line=facts.line(batch, rows),
        made_at=made_at,
        style=Markup(style),  # noqa: S704 - our own file
        script=Markup(script),  # noqa: S704
        policy=policy(style, script),
        totals=facts.totals(rows, len(batch.runs)),
        facts=facts.how_it_ran(batch, rows, evidence, made_at),
        agents=facts.agents(batch.suite, rows),
        matrix=matrix(rows),
        ends=ends(rows),
        charts=charts,
        more_charts=more_charts,
        timeline=timeline(rows),
        costs=cost_chart(rows),
        runs=run_views(rows, evidence),
        rows=len(rows),
        labels=OUTCOMES,
        parts=list(PARTS),
    )


def policy(style: str, script: str) -> str:
    """Returns the page's Content Security Policy: nothing is loaded, and only this style and this script count."""
    return (
        f"default-src 'none'; style-src {_hash_of(style)}; script-src {_hash_of(script)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


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
