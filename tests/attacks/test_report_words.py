"""A family, an agent or a tampered queue puts HTML, scripts and foreign links into a batch's report.

The page shows text as text, runs no script, loads nothing, and links only to the logs of environments.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from html.parser import HTMLParser
from typing import Any

import pytest

from provisioner.batch.report import render
from provisioner.batch.results import Row

AT = datetime(2026, 1, 2, tzinfo=UTC)
WORDS = {
    "script": "<script>alert(1)</script>",
    "attribute": '" onmouseover="alert(1)" x="',
    "single": "' onload='alert(1)",
    "style": "</style><script>alert(1)</script>",
    "title": "</title><script>alert(1)</script>",
    "image": "<img src=x onerror=alert(1)>",
    "entity": "&lt;script&gt;",
    "template": "{{ 7 * 7 }} {% raw %}",
    "bidi": "\u202etxt.exe",
    "control": "\x00\x1b]0;x\x07",
}


class Page(HTMLParser):
    """Collects a page's tags and their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def row(words: str, **changes: Any) -> Row:
    fields = {
        "key": f"fam/{words}/one/1", "family": "fam", "task": words, "agent": words, "repetition": 1,
        "outcome": "task_failed", "message": words, "retried": (words,), "environment": "fam-main-1",
        "started_at": AT, "ended_at": AT, "phases": [{"name": words, "seconds": 1}],
    }  # fmt: skip
    return Row.model_validate({**fields, **changes})


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
def test_words_are_text(words: str) -> None:
    text = render(words, [row(words)], AT, "../archive")
    page = Page(text)
    harmless = Page(render("s", [row("main")], AT, "../archive"))
    assert [tag for tag, _ in page.tags] == [tag for tag, _ in harmless.tags]
    assert [sorted(attributes) for _, attributes in page.tags] == [sorted(known) for _, known in harmless.tags]
    assert not {"\u202e", "\0", "\x1b", "\x07"} & set(text)


@pytest.mark.parametrize(
    "environment",
    [
        "//evil.example/x",
        "/etc/passwd",
        "javascript:alert(1)",
        "../../../x",
        "http://evil",
        "a b",
        "a/b",
        "a?b#c",
        "\\\\evil",
    ],
    ids=["host", "absolute", "script", "upwards", "scheme", "space", "slash", "query", "backslash"],
)
def test_only_the_logs_of_environments_are_linked(environment: str) -> None:
    page = Page(render("s", [row("main", environment=environment)], AT, "../archive"))
    assert [attributes["href"] for tag, attributes in page.tags if tag == "a"] == []


def test_the_page_forbids_itself_scripts_and_foreign_files() -> None:
    text = render("s", [row("main")], AT, "../archive")
    [policy] = [
        attributes["content"] for tag, attributes in Page(text).tags
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    ]  # fmt: skip
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    assert [attributes["href"] for tag, attributes in Page(text).tags if tag == "a"] == ["../archive/fam-main-1/logs"]
    assert not re.search(r"<script|javascript:|\son[a-z]+=", text)
