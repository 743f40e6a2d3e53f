"""Defines a finding: where a family has a mistake, what it is, why it matters and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from provisioner.printable import beginning, printable

Level = Literal["error", "warning"]
Rule = Literal[
    "invalid-file",
    "unknown-task",
    "unknown-manifest-task",
    "unmatched-glob",
    "missing-variable",
    "empty-variable",
    "wrong-parameters",
    "async-method",
    "misspelt-name",
    "missing-instructions",
    "no-score",
    "import-before-install",
    "secret-in-file",
    "not-checked",
]

RULES_PAGE = "docs/reference/family-checks.md"
MAXIMUM_FINDINGS = 100
MAXIMUM_CHARACTERS = 2000


@dataclass(frozen=True)
class Finding:
    """One mistake. Texts are printable and bounded, whatever the family says.

    Args:
        level: an error, with which the family surely fails; or a warning.
        rule: the name of what was checked; RULES_PAGE has a section for each.
        file: the file, relative to the family's directory; empty for the family as a whole.
        line: the line in the file, or None.
        what: what is wrong.
        why: why it matters.
        fix: what to do.
    """

    level: Level
    rule: Rule
    file: str
    line: int | None
    what: str
    why: str
    fix: str

    def __post_init__(self) -> None:
        """Makes the texts printable."""
        for name in ("file", "what", "why", "fix"):
            object.__setattr__(self, name, printable(beginning(getattr(self, name), MAXIMUM_CHARACTERS)))

    @property
    def place(self) -> str:
        """Returns FILE:LINE, as far as it is known."""
        return f"{self.file}:{self.line}" if self.file and self.line else self.file

    @property
    def see(self) -> str:
        """Returns the section of the documentation that explains the rule."""
        return f"{RULES_PAGE}#{self.rule}"


def bounded(findings: list[Finding]) -> list[Finding]:
    """Sorts findings, errors first and then by place, and leaves out those beyond MAXIMUM_FINDINGS."""
    found = sorted(set(findings), key=lambda each: (each.level != "error", each.file, each.line or 0, each.rule))
    if len(found) <= MAXIMUM_FINDINGS:
        return found
    left_out = len(found) - MAXIMUM_FINDINGS
    return [
        *found[:MAXIMUM_FINDINGS],
        Finding("warning", "not-checked", "", None, f"{left_out} more findings are not shown.", "They are too many.",
                "Mend those that are shown, and check again."),
    ]  # fmt: skip
