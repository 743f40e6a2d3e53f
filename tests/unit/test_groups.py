"""Tests that tests which share an environment run in one worker process, as pytest-xdist shows in their ids."""

from __future__ import annotations

import os

import pytest


@pytest.mark.xdist_group("groups")
@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="one process runs all tests")
def test_groups_are_kept(request: pytest.FixtureRequest) -> None:
    assert request.node.nodeid.endswith("@groups"), "each worker makes what a group shares; was --dist loadgroup given?"
