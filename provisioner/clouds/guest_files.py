"""Finds the files that go into machines, whichever cloud they run on: base image recipes and guest programs."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).parent.parent

BASE_IMAGE = _PACKAGE / "base_image"
"""What turns a plain Debian into a base image: package lists, configuration and scripts."""
GUEST = _PACKAGE / "guest"
"""What runs inside machines: the helper and all that it imports."""


def packages(name: str = "packages.txt") -> list[str]:
    """Returns the names of Debian packages from one of the lists in base_image/."""
    lines = (BASE_IMAGE / name).read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]
