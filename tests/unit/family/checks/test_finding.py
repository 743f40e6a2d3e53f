"""Findings are printable, bounded, and in an order that shows errors first."""

from __future__ import annotations

from provisioner.family.checks.finding import MAXIMUM_CHARACTERS, MAXIMUM_FINDINGS, Finding, Level, bounded


def finding(level: Level, line: int, what: str = "x") -> Finding:
    return Finding(level, "no-score", "fam.py", line, what, "why", "fix")


def test_texts_are_printable_lines_and_bounded() -> None:
    each = finding("error", 1, "\x1b]52;c;AAAA\x07\u202e\n" + "x" * 2 * MAXIMUM_CHARACTERS)
    assert each.what.isprintable()
    assert len(each.what) <= MAXIMUM_CHARACTERS


def test_the_place_names_what_is_known() -> None:
    assert finding("error", 3).place == "fam.py:3"
    assert Finding("error", "no-score", "fam.py", None, "", "", "").place == "fam.py"
    assert Finding("error", "no-score", "", None, "", "", "").place == ""


def test_errors_come_first_and_each_finding_once() -> None:
    mixed = [finding("warning", 1), finding("error", 9), finding("error", 2), finding("error", 9)]
    assert [(each.level, each.line) for each in bounded(mixed)] == [("error", 2), ("error", 9), ("warning", 1)]


def test_too_many_are_counted() -> None:
    many = bounded([finding("warning", line) for line in range(MAXIMUM_FINDINGS + 7)])
    assert len(many) == MAXIMUM_FINDINGS + 1
    assert many[-1].what == "7 more findings are not shown."
