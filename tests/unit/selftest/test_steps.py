"""Tests how the steps of a self-test run: each is announced, and the first failure ends it."""

from __future__ import annotations

from provisioner.errors import HostError
from provisioner.selftest.steps import Step, run_steps
from tests.unit.fakes.world import Told


def test_each_step_is_announced_with_its_cost_before_it_runs() -> None:
    told = Told()
    heard: list[int] = []

    def look() -> str:
        heard.append(len(told.notes))
        return "all is well"

    outcome = run_steps([Step("first", "looks", 0, look), Step("second", "pays", 12_300, look, 4_500)], told)
    assert heard == [1, 3]
    assert told.notes[0] == "1 of 2, first: looks (costs nothing)"
    assert told.notes[2] == "2 of 2, second: pays (costs usually 0.0045 USD, at most 0.0123 USD)"
    assert outcome.failure is None
    assert [(each.name, each.found, each.passed) for each in outcome.results] == [
        ("first", "all is well", True),
        ("second", "all is well", True),
    ]


def test_the_first_failure_ends_it() -> None:
    begun: list[str] = []

    def refuse() -> str:
        begun.append("second")
        raise HostError("You may not.", hint="Ask.")

    steps = [
        Step("first", "works", 0, lambda: "well"),
        Step("second", "fails", 0, refuse),
        Step("third", "is not reached", 0, refuse),
    ]
    outcome = run_steps(steps, Told())
    assert begun == ["second"]
    assert [(each.name, each.found, each.passed) for each in outcome.results][1:] == [("second", "You may not.", False)]
    assert isinstance(outcome.failure, HostError)
