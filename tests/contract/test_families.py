"""Tests families in all forms that METR's own driver accepts: their tests run, and they are scored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from provisioner.store.home import Home
from tests.command_line import provisioner

pytestmark = pytest.mark.vm
FAMILIES = Path(__file__).parent / "families"


@pytest.mark.parametrize(
    ("family", "tests", "submission", "score"),
    [
        pytest.param("relative_import", "1 passed, 1 skipped", "abandon", 1.0, id="relative import"),
        pytest.param("both_scorings", "1 passed", "0.5", 0.5, id="both scorings"),
    ],
)
def test_a_family_as_metrs_driver_takes_it(
    test_home: Home, family: str, tests: str, submission: str, score: float
) -> None:
    directory = str(FAMILIES / family)
    tested = provisioner(test_home, "test", directory, "main")
    assert tested.returncode == 0, tested.stdout + tested.stderr
    assert tests in tested.stdout + tested.stderr
    run = provisioner(test_home, "run", directory, "main", "--submission", submission, "--json")
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert (result["status"], result["score"]) == ("scored", score)
    # At the start and at the end; a family without intermediate_score has none.
    assert [entry["score"] for entry in result["score_log"]] == ([0.1, 0.1] if family == "both_scorings" else [])
