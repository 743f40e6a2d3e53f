"""Tests that a paused machine resumes."""

from __future__ import annotations

from pathlib import Path

import pytest

from provisioner.clouds.local.frozen import snapshots
from provisioner.clouds.local.frozen.snapshots import PAUSED_FILE, end_if_abandoned, held
from provisioner.store.files import is_locked
from tests.unit.fakes.qmp import serving
from tests.waiting import BOUND_SECONDS

HELLO = "qmp_capabilities"
RESUMES = ["migrate_cancel", "query-status", "cont"]


def stop_and_fail(directory: Path) -> None:
    with held(directory) as qmp:
        qmp.execute("stop")
        assert is_locked(directory / PAUSED_FILE)
        raise ZeroDivisionError


def test_a_paused_machine_resumes_whatever_happens(tmp_path: Path) -> None:
    with serving(tmp_path, {}) as commands:
        with pytest.raises(ZeroDivisionError):
            stop_and_fail(tmp_path)
        assert commands == [HELLO, "stop", *RESUMES]
    assert not (tmp_path / PAUSED_FILE).exists()


def test_a_machine_paused_by_a_live_process_is_left_alone(tmp_path: Path) -> None:
    with serving(tmp_path, {}), held(tmp_path):
        end_if_abandoned(tmp_path, BOUND_SECONDS)  # QEMU would have no answer: it serves one client
        assert (tmp_path / PAUSED_FILE).exists()


def test_an_abandoned_machine_is_resumed_once(tmp_path: Path) -> None:
    (tmp_path / PAUSED_FILE).touch()
    with serving(tmp_path, {}) as commands:
        end_if_abandoned(tmp_path, BOUND_SECONDS)
        end_if_abandoned(tmp_path, BOUND_SECONDS)
        assert commands == [HELLO, *RESUMES]


def test_a_machine_that_does_not_resume_is_tried_again(tmp_path: Path) -> None:
    (tmp_path / PAUSED_FILE).touch()
    with pytest.raises(OSError, match="No such file"):
        end_if_abandoned(tmp_path, BOUND_SECONDS)
    assert (tmp_path / PAUSED_FILE).exists()


def test_a_qemu_that_never_stops_writing_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "GIVING_UP_SECONDS", 0.1)
    (tmp_path / PAUSED_FILE).touch()
    with serving(tmp_path, {"query-status": {"status": "finish-migrate"}}) as commands:
        end_if_abandoned(tmp_path, BOUND_SECONDS)
        assert commands[-1] == "cont"
