"""Finds the Terraform modules and templates: inside the installed package, or next to it in a checkout."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).parent


def directory(name: str) -> Path:
    """Returns the path of a data directory.

    Args:
        name: `terraform` or `templates`.
    """
    installed = _PACKAGE / "_data" / name
    return installed if installed.is_dir() else _PACKAGE.parent / name
