"""Takes pages of the documentation apart: commands in indented blocks, fenced blocks of a language, lists of names."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from tests.command_line import ROOT

AUTHORING = ROOT / "docs" / "authoring"
# Commands of a page that only its reader can complete.
_NAMES = re.compile(r"\b(BUILDER|ENV|FAMILY|TASK)\b")


@dataclass(frozen=True)
class Block:
    """A block of a page.

    Args:
        language: the word behind the fence; empty for an indented block, which is pasted into a shell.
        text: without its indentation.
    """

    language: str
    text: str

    @property
    def for_a_shell(self) -> bool:
        """Whether it is pasted as it stands."""
        return not self.language and _NAMES.search(self.text) is None


def blocks(page: Path) -> list[Block]:
    """Returns a page's blocks in order. A block that is indented in a list has the list's indentation removed."""
    lines = iter(page.read_text().splitlines())
    found: list[Block] = []
    gathered: list[str] = []
    inside_list = False
    for line in lines:
        fence = re.match(r" *```(\w+)$", line)
        margin = 7 if inside_list else 4
        if fence is None and (line.startswith(" " * margin) or (not line and gathered)):
            gathered.append(line[margin:])
            continue
        found += _shell(gathered)
        gathered = []
        if fence:
            text = "\n".join(iter(lambda: next(lines), line.replace(fence[1], "")))
            found.append(Block(fence[1], textwrap.dedent(text)))
        elif line:
            inside_list = bool(re.match(r"\d+\. ", line)) or (inside_list and line.startswith("   "))
    return [*found, *_shell(gathered)]


def lacked_by_base_images() -> set[str]:
    """Returns the paths and packages of Debian's cloud image that base images lack by the reference."""
    page = (ROOT / "docs" / "reference" / "task-families.md").read_text()
    section = page.split("\n### What base images lack\n")[1].split("\n#")[0]
    rows = " ".join(re.findall(r"^\|([^|]*)\|", section, re.MULTILINE))
    packages = section[section.index("\nOn AWS") :]
    return set(re.findall(r"`([^` ]+)`", rows + packages))


def matches(name: str, patterns: set[str]) -> bool:
    """Returns whether a name is one of those that patterns stand for."""
    return any(fnmatch(name, pattern) for pattern in patterns)


def _shell(lines: list[str]) -> list[Block]:
    text = "\n".join(lines).rstrip()
    return [Block("", text)] if text else []
