"""Tests how a campaign that was interrupted continues."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from tests.campaigns import Passed


@pytest.mark.parametrize(
    ("reported", "noted"),
    [("a.py::test", "a.py::test"), ("a.py::test@group", "a.py::test"), ("a.py::test[a@b]@group", "a.py::test[a@b]"),
     ("a.py::test[a@b]", "a.py::test[a@b]")],
    ids=["alone", "of a group", "parameter of a group", "parameter"],
)  # fmt: skip
def test_what_has_passed_is_noted_by_its_own_name(tmp_path: Path, reported: str, noted: str) -> None:
    passed = Passed(tmp_path / "passed")
    phases: tuple[Literal["setup", "call", "teardown"], ...] = ("setup", "call", "teardown")
    for when in phases:
        passed.pytest_runtest_logreport(
            pytest.TestReport(reported, ("a.py", 1, "test"), {}, "passed", longrepr=None, when=when)
        )
    assert (tmp_path / "passed").read_text() == f"{noted}\n"
