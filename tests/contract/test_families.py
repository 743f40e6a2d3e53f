"""Families in the forms that METR's own driver accepts: their tests run, and they are scored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from provisioner.store.home import Home
from tests.command_line import provisioner

pytestmark = pytest.mark.vm
FAMILIES = Path(__file__).parent / "families"


@pytest.mark.parametrize(
    ("family", "summary"),
    [
        pytest.param("relative_import", "1 passed, 1 skipped", id="relative import"),
        pytest.param("both_scorings", "1 passed", id="both scorings"),
    ],
)
def test_a_familys_tests_may_name_metrs_plugin(test_home: Home, family: str, summary: str) -> None:
    done = provisioner(test_home, "test", str(FAMILIES / family), "main")
    assert done.returncode == 0, done.stdout + done.stderr
    assert summary in done.stdout + done.stderr


@pytest.mark.story
def test_a_family_that_is_a_package_is_run(test_home: Home) -> None:
    family = str(FAMILIES / "relative_import")
    done = provisioner(test_home, "run", family, "main", "--submission", "-", "--json", stdin="abandon")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    # score() is its end score.
    assert (result["status"], result["score"]) == ("scored", 1.0)
    assert [(entry["score"], entry["message"]) for entry in result["score_log"]] == [
        (0.1, {"hint": "it has 7 letters"})
    ] * 2
