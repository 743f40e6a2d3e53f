"""The tests' home is shared only by versions whose records of images look the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import Field, create_model

from provisioner.base.models import SetupData
from provisioner.store.images import Image
from tests.homes import cache, format_key


def test_a_record_with_another_field_has_another_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVISIONER_TEST_HOME", str(tmp_path))
    assert cache() == tmp_path / format_key(Image, SetupData)
    changed = create_model("Image", __base__=Image, another=(int, 0))
    assert format_key(changed, SetupData) != format_key(Image, SetupData)
    with_its_name = create_model("Image", __base__=Image, description=(str, ""))
    assert format_key(with_its_name) != format_key(create_model("Image", __base__=Image, description=(int, 0)))


def test_documentation_does_not_change_the_home() -> None:
    documented = create_model(
        "Image", __base__=Image, __doc__="A record.", cloud=(str, Field("local", description="whose machines boot it"))
    )
    assert format_key(documented) == format_key(Image)
