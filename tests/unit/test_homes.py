"""The tests' home is shared only by versions whose records of images look the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel, Field

from provisioner.models import SetupData
from provisioner.store.images import Image
from tests.homes import cache, format_key


class Before(Image):
    """A record."""


class Documented(Image):
    """The same record in other words."""

    family: str | None = Field(default=None, description="the task family")


class After(Image):
    """A record."""

    another: int = 0


def test_a_record_with_another_field_has_another_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVISIONER_TEST_HOME", str(tmp_path))
    assert cache() == tmp_path / format_key(Image, SetupData)
    keys = {format_key(_named(record), SetupData) for record in (Before, After)}
    assert len(keys) == 2


def test_documentation_does_not_change_the_home() -> None:
    assert format_key(_named(Before)) == format_key(_named(Documented))


def _named(record: type[BaseModel]) -> type[BaseModel]:
    """Returns a record under one name, which is part of its schema."""
    return type("Image", (record,), {"__module__": __name__})
