"""A family, an agent or a tampered queue puts HTML, scripts and foreign links into a batch's report.

The page shows text as text, runs no script but its own, loads nothing, and links nowhere.
"""

from __future__ import annotations

import base64
import hashlib
import re
from datetime import UTC, datetime
from html.parser import HTMLParser
from typing import Any

import pytest

from provisioner.batch.records import Batch
from provisioner.batch.report.evidence import Evidence
from provisioner.batch.report.page import render
from provisioner.batch.results import Row
from provisioner.batch.suite import Suite

AT = datetime(2026, 1, 2, tzinfo=UTC)
WORDS = {
    "script": "<script>alert(1)</script>",
    "script-end": "</script><script>alert(1)</script>",
    "comment": "--><!--<script>",
    "cdata": "]]><svg onload=alert(1)>",
    "attribute": '" onmouseover="alert(1)" x="',
    "single": "' onload='alert(1)",
    "unquoted": " onload=alert(1) `",
    "style": "</style><script>alert(1)</script>",
    "css": "}*{background:url(//evil.example)}",
    "title": "</title><script>alert(1)</script>",
    "pre": "</pre></details></li></ol><form action=//evil.example>",
    "svg": "</title></svg><image href=//evil.example/x>",
    "image": "<img src=x onerror=alert(1)>",
    "base": "<base href=//evil.example>",
    "refresh": '<meta http-equiv=refresh content="0;url=//evil.example">',
    "clobber": "<input id=list name=controls>",
    "link": "javascript:alert(1)",
    "json": '"}]}</script>',
    "entity": "&lt;script&gt;",
    "template": "{{ 7 * 7 }} {% raw %}",
    "bidi": "\u202etxt.exe\u2066\u2069\u200f",
    "invisible": "\u200b\u2060\ufeff\U000e0041",
    "control": "\x00\x1b]0;x\x07\x9b31m",
    "lines": "a\u2028b\u2029c\rd\x85e",
}
ODD = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\U000e0000-\U000e007f]")


class Page(HTMLParser):
    """Collects a page's tags and their attributes. Where names may be broken into lines depends on the names."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "wbr":
            self.tags.append((tag, dict(attrs)))


def row(words: str, **changes: Any) -> Row:
    log = [{"score": 1, "elapsed_seconds": 1, "scored_at": AT, "message": {words: words}, "details": {}}]
    fields = {
        "key": f"fam/{words}/one/1", "family": words, "task": words, "agent": words, "repetition": 1,
        "outcome": "task_failed", "message": words, "retried": (words,), "environment": words, "cloud": words,
        "region": words, "machine_types": {words: words}, "images": {words: words}, "version": words,
        "cost_micro_usd": 1, "attempts": 2, "score": 0.5, "score_log": log,
        "started_at": AT, "ended_at": AT, "phases": [{"name": words, "seconds": 1}],
    }  # fmt: skip
    return Row.model_validate({**fields, **changes})


def page_of(words: str) -> str:
    """The page of two agents' runs, all of whose texts are these words."""
    data = {
        "name": "s", "families": [{"path": words}], "agents": [{"name": "one", "directory": words, "command": words}],
        "submissions": [{"name": "two", "text": words}], "regions": [words], "cloud": "aws",
    }  # fmt: skip
    suite = Suite.model_validate(data)
    batch = Batch(
        id=words, suite=suite, suite_file=words, shared=False, created_at=AT, version=words, runs=()
    )  # fmt: skip
    rows = [row(words), row(words, agent=f"{words}2", key=f"{words}2")]
    evidence = Evidence(
        instructions=words, submission=words, agent_output=words, log_name=words, log=words, machines={words: words}
    )
    return render(batch, rows, {each.key: evidence for each in rows})


HARMLESS = Page(page_of("main"))


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
def test_words_are_text(words: str) -> None:
    text = page_of(words)
    page = Page(text)
    assert [tag for tag, _ in page.tags] == [tag for tag, _ in HARMLESS.tags]
    assert [sorted(attributes) for _, attributes in page.tags] == [sorted(known) for _, known in HARMLESS.tags]
    assert not ODD.search(text)


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
def test_no_words_become_an_id_a_class_or_an_address(words: str) -> None:
    def named(page: Page) -> list[tuple[str, str | None]]:
        names = ("id", "class", "href", "src", "style", "for", "name", "role", "content")
        return [item for _, attributes in page.tags for item in attributes.items() if item[0] in names]

    assert named(Page(page_of(words))) == named(HARMLESS)


def test_the_policy_allows_the_pages_own_style_and_script_alone() -> None:
    text = page_of(WORDS["script-end"])
    [policy] = [
        attributes["content"] for tag, attributes in Page(text).tags
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    ]  # fmt: skip
    hashes = {}
    for tag in ("style", "script"):
        [body] = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        hashes[tag] = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
    assert policy == (
        f"default-src 'none'; style-src 'sha256-{hashes['style']}'; script-src 'sha256-{hashes['script']}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    # No attribute needs a style or a script of its own, so the policy is as strict as it looks.
    assert not [name for _, attributes in Page(text).tags for name in attributes if re.match("on|style$", name)]
    assert not [tag for tag, _ in Page(text).tags if tag in ("a", "iframe", "object", "embed", "base", "img")]
