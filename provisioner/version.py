"""Holds the version of provisioner, which pyproject.toml reads."""

__version__ = "0.2.dev0"
