"""What a controller bears of its database and disk."""

from __future__ import annotations

import pytest

from provisioner.cli.commands.batch import running
from provisioner.cli.commands.batch.running import OutageTolerance
from provisioner.errors import InfrastructureError, LivenessLostError


def test_an_outage_is_noted_once_and_tolerated_until_it_ends() -> None:
    notes: list[str] = []
    outage = OutageTolerance(notes.append)
    for _ in range(3):
        with outage.tolerated():
            raise InfrastructureError("It restarts.")
    assert len(notes) == 1
    with outage.tolerated():
        pass
    with outage.tolerated():
        raise OSError("disk full")
    assert len(notes) == 2


def test_an_outage_that_lasts_too_long_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "OUTAGE_SECONDS", -1.0)
    outage = OutageTolerance(lambda _: None)
    with outage.tolerated():
        raise OSError("disk full")
    with pytest.raises(OSError, match="disk full"), outage.tolerated():
        raise OSError("disk full")


def test_a_worker_that_others_consider_dead_stops_at_once() -> None:
    with pytest.raises(LivenessLostError), OutageTolerance(lambda _: None).tolerated():
        raise LivenessLostError("Others consider this worker dead.")
