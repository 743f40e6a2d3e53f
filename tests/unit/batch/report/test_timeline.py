"""When runs were at what, and what tasks cost."""

from __future__ import annotations

from datetime import timedelta

from provisioner.batch.report.outcomes import PARTS
from provisioner.batch.report.timeline import MAX_LINES, cost_chart, timeline
from tests.unit.batch.report.samples import BEGIN, row


def test_phases_follow_each_other_from_the_beginning() -> None:
    later = row(2, started_at=BEGIN + timedelta(seconds=30), ended_at=BEGIN + timedelta(seconds=120))
    found = timeline([row(1), later, row(3, started_at=None)])
    assert [tick.label for tick in found.axis.ticks] == ["0", "30s", "1m", "1m30s", "2m"]
    assert [[(list(PARTS)[bar.part], bar.at, bar.width) for bar in bars] for _, bars in found.lines] == [
        [("machines", 0, 25), ("agent", 25, 50)],
        [("machines", 25, 25), ("agent", 50, 50)],
    ]
    assert found.lines[0][1][0].words == "boot: 30.0 s"


def test_odd_times_stay_on_the_axis() -> None:
    backwards = row(1, ended_at=BEGIN - timedelta(days=1), phases=[{"name": "boot", "seconds": -1e10}])
    [(_, [bar])] = timeline([backwards]).lines
    assert (bar.at, bar.width) == (0, 0)
    assert timeline([]).lines == ()
    many = timeline([row(number) for number in range(MAX_LINES + 5)])
    assert (len(many.lines), many.left_out) == (MAX_LINES, 5)


def test_costs_are_left_out_if_nothing_is_billed() -> None:
    assert cost_chart([row(1), row(2)]).lines == ()
    found = cost_chart([row(1, cost_micro_usd=10_000), row(2, cost_micro_usd=2500), row(3, task="b", cost_micro_usd=1)])
    assert found.lines[0] == ("guess/easy", 83.33, "0.0125")
    assert [tick.label for tick in found.axis.ticks] == ["0", "0.005", "0.010", "0.015"]
