"""Where the Terraform modules and templates lie: inside the installed package, or beside it in a checkout."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).parent


def directory(name: str) -> Path:
    """The directory `terraform` or `templates`.

    Args:
        name: one of the two.
    """
    installed = _PACKAGE / "_data" / name
    return installed if installed.is_dir() else _PACKAGE.parent / name
