"""Writes what came of a self-test as text that can be sent to strangers: it names no account, user or key. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from provisioner.printable import printable_lines
from provisioner.selftest.steps import Outcome

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
