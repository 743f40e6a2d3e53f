"""The reference lists the modules of METR's image that ours has not."""

from __future__ import annotations

import pytest

from provisioner.family.missing_modules import OF_METRS_IMAGE, PAGE
from tests.command_line import ROOT


@pytest.mark.parametrize("module", OF_METRS_IMAGE)
def test_the_reference_names_modules_of_metrs_image(module: str) -> None:
    path, _, _ = PAGE.partition("#")
    section = (ROOT / path).read_text().split("\n### What METR's image has besides\n")[1].split("\n#")[0]
    requirement = OF_METRS_IMAGE[module]
    assert f"`{requirement.partition('==')[0]}`" in section or f"`{module}`" in section
    assert "==" not in requirement or f"pip install {requirement}" in section
