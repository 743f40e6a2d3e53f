"""Tests the probe program's own bookkeeping. tests/local runs it in real machines."""

from __future__ import annotations

import importlib.util
import time
from types import ModuleType

import pytest

from provisioner.clouds.guest_files import GUEST


@pytest.fixture
def probe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("probe", GUEST / "probe.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_probe_that_never_answers_counts_as_not_reached(probe: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "SECONDS", 0.05)
    monkeypatch.setattr(probe, "_probes", lambda _: [("quick", lambda: "here"), ("neighbour", lambda: time.sleep(5))])
    assert probe._try_all({}, "root") == [
        {"user": "root", "probe": "quick", "reached": True, "detail": "here"},
        {"user": "root", "probe": "neighbour", "reached": False, "detail": "no answer"},
    ]
