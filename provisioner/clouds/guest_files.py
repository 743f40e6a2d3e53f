"""Finds the files that go into machines, whichever cloud they run on: base image recipes and guest programs."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).parent.parent

BASE_IMAGE = _PACKAGE / "base_image"
"""What turns a plain Debian into a base image: package lists, configuration and scripts."""
GUEST = _PACKAGE / "guest"
"""What runs inside machines: the exec server, the helper, and what they import."""
SENT = GUEST / "sent"
"""The programs whose text the controller sends with each call, so that no machine can have changed them."""


def guest_programs() -> list[str]:
    """Returns the paths, relative to GUEST, of the files that images contain, sorted."""
    paths = (path for path in GUEST.rglob("*") if path.is_file() and SENT not in path.parents)
    return sorted(str(path.relative_to(GUEST)) for path in paths if "__pycache__" not in path.parts)


def packages(name: str = "packages.txt") -> list[str]:
    """Returns the names of Debian packages from one of the lists in base_image/."""
    lines = (BASE_IMAGE / name).read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]
