"""The active runs of a process, and how they are told to stop."""

from __future__ import annotations

import pytest

from provisioner.base.errors import Interrupted
from provisioner.batch.live_status import LiveStatus, RunProgress


def test_a_run_that_starts_again_before_its_end_stays_active() -> None:
    status = LiveStatus()
    with status.track("run") as old:
        again = status.track("run")
        new = again.__enter__()
    assert status.active_runs() == [new]
    status.stop("run")
    assert (old.stop.is_set(), new.stop.is_set()) == (False, True)
    again.__exit__(None, None, None)
    assert status.active_runs() == []


def test_a_run_that_is_told_to_stop_cleans_up_first() -> None:
    status = LiveStatus()
    with status.track("run") as run:
        run.check()
        status.stop("run")
        with run.shield():
            run.check()
        with pytest.raises(Interrupted):
            run.check()


def test_runs_that_start_after_all_were_stopped_are_stopped_too() -> None:
    status = LiveStatus()
    with status.track("early") as early:
        status.stop_all()
        with status.track("late") as late:
            assert (early.stop.is_set(), late.stop.is_set()) == (True, True)


def test_a_runs_progress_shows_its_phase_and_notes_once() -> None:
    status = LiveStatus()
    with status.track("run") as run:
        progress = RunProgress(status, run)
        progress.phase_started("boot")
        progress.note("slow today")
        progress.output("what the machine says")
        assert status.active_runs()[0].phase == "boot"
    assert status.take_notes() == [("run", "slow today")]
    assert status.take_notes() == []
