#!/usr/bin/env python3
"""Draws the package's folders and modules in the order of its import layers, from .importlinter.

Usage: scripts/architecture.py            prints the drawing
       scripts/architecture.py --write    puts it into docs/architecture.md, between the two marks
"""

from __future__ import annotations

import configparser
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "provisioner"
DOCUMENT = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- scripts/architecture.py begins -->", "<!-- scripts/architecture.py ends -->"
WIDTH = 116


def layers() -> list[list[str]]:
    """The layers of the import contract, top first; modules of one layer do not import each other."""
    contracts = configparser.ConfigParser()
    contracts.read(ROOT / ".importlinter")
    lines = contracts["importlinter:contract:layers"]["layers"].split("\n")
    return [[name.strip() for name in line.split("|")] for line in lines if line.strip()]


def drawing() -> str:
    """The names of each layer below those that import it, folders with a / behind them."""
    lines = [", ".join(f"{name}/" if (PACKAGE / name).is_dir() else name for name in layer) for layer in layers()]
    return "\n".join(textwrap.fill(line, WIDTH) for line in lines)


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
