"""Where modules and templates lie: in the installed package, or beside it in a checkout."""

from __future__ import annotations

from pathlib import Path

import pytest

from provisioner import package_data


def test_in_a_checkout_they_lie_beside_the_package() -> None:
    assert (package_data.directory("templates") / "stack.tf.j2").is_file()
    assert (package_data.directory("terraform") / "local" / "environment" / "main.tf").is_file()


def test_what_was_installed_with_the_package_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package_data, "_PACKAGE", tmp_path / "provisioner")
    assert package_data.directory("templates") == tmp_path / "templates"
    (tmp_path / "provisioner" / "_data" / "templates").mkdir(parents=True)
    assert package_data.directory("templates") == tmp_path / "provisioner" / "_data" / "templates"
    assert package_data.directory("terraform") == tmp_path / "terraform"
