#!/usr/bin/env python3
"""Draws the package's folders in the order of its import layers, from .importlinter and the modules' docstrings.

Usage: scripts/architecture.py            prints the drawing
       scripts/architecture.py --write    puts it into docs/architecture.md, between the two marks
"""

from __future__ import annotations

import ast
import configparser
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "provisioner"
DOCUMENT = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- scripts/architecture.py begins -->", "<!-- scripts/architecture.py ends -->"
WIDTH, NAMES = 116, 14


def layers() -> list[list[str]]:
    """The layers of the import contract, top first; modules of one layer do not import each other."""
    contracts = configparser.ConfigParser()
    contracts.read(ROOT / ".importlinter")
    lines = contracts["importlinter:contract:layers"]["layers"].split("\n")
    return [[name.strip() for name in line.split("|")] for line in lines if line.strip()]


def purpose(path: Path) -> str:
    """The first sentence of a module's docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    sentence, stop, _ = " ".join(docstring.split("\n\n")[0].split()).partition(". ")
    return sentence + ("." if stop else "")


def wrapped(name: str, text: str) -> list[str]:
    """A name and, in a column of its own, a text."""
    lines = textwrap.wrap(text, WIDTH - NAMES) or [""]
    return [f"{name:{NAMES}}{lines[0]}", *(f"{'':{NAMES}}{line}" for line in lines[1:])]


def drawing() -> str:
    """The folders with their purposes and the names of the other modules, each layer below those that import it."""
    lines: list[str] = []
    for layer in layers():
        folders = [PACKAGE / name for name in layer if (PACKAGE / name).is_dir()]
        for folder in folders:
            lines += wrapped(f"{folder.name}/", purpose(folder / "__init__.py"))
        modules = ", ".join(name for name in layer if PACKAGE / name not in folders)
        lines += textwrap.wrap(modules, WIDTH)
    return "\n".join(line.rstrip() for line in lines)


def document() -> str:
    """docs/architecture.md with the drawing of today between the marks."""
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n```text\n{drawing()}\n```\n{END}{after}"


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        DOCUMENT.write_text(document())
    elif sys.argv[1:]:
        sys.exit(__doc__)
    else:
        print(drawing())
