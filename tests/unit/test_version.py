"""The version that the package and its metadata tell."""

from __future__ import annotations

from importlib.metadata import version

from provisioner.version import __version__


def test_the_installed_package_has_the_version_of_the_code() -> None:
    assert version("provisioner") == __version__
