"""Tells the tests that `scripts/test` always runs from those that it leaves to campaigns.

In the folders of real things, a test is left to the campaign of its folder unless it has the mark `story`. Elsewhere it
is left to a campaign only if it has the mark `campaign`. A test with both marks is left to its campaign.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
# The campaign of each folder of real things; a test with the mark `ec2` belongs to the campaign of that name.
CAMPAIGNS = {
    "aws": "aws",
    "batch": "batch",
    "contract": "local",
    "examples": "local",
    "inspect": "inspect",
    "local": "local",
    "soak": "soak",
}
# The campaign of each other folder's tests with the mark `campaign`.
ELSEWHERE = {"attacks": "attacks", "terraform": "aws", "unit": "unit"}
# A file of the tests that have passed, one name in each line: with it, an interrupted campaign continues.
PASSED = "PROVISIONER_TEST_PASSED"
LEFT = "left_to_campaigns"
# The marks that `scripts/test` selects by.
STORIES = "not campaign"

passed_before = pytest.StashKey[set[str]]()
left_to_campaigns = pytest.StashKey[Counter[str]]()


def campaign(item: pytest.Item) -> str:
    """Returns the name of the campaign that runs a test."""
    if item.get_closest_marker("ec2"):
        return "ec2"
    return (CAMPAIGNS | ELSEWHERE)[_folder(item)]


def cases(names: Collection[str], left: set[str]) -> list[Any]:
    """Returns the parameters of a test of which some are left to the campaign: those in `left`."""
    assert left.issubset(names)
    return [pytest.param(name, marks=[pytest.mark.campaign] if name in left else []) for name in names]


def _folder(item: pytest.Item) -> str:
    return item.path.relative_to(TESTS).parts[0]


def pytest_configure(config: pytest.Config) -> None:
    """Reads which tests have passed before. The workers of pytest-xdist must all skip the same ones."""
    config.stash[left_to_campaigns] = Counter()
    config.stash[passed_before] = set()
    if path := os.environ.get(PASSED):
        workers_input = getattr(config, "workerinput", None)
        names = workers_input[PASSED] if workers_input else Path(path).read_text().splitlines()
        config.stash[passed_before] = set(names)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tells a worker of pytest-xdist which tests have passed before."""
    node.workerinput[PASSED] = sorted(node.config.stash[passed_before])


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what is left to a campaign, and leaves out what has passed before."""
    for item in items:
        if item.get_closest_marker("ec2"):
            item.add_marker(pytest.mark.xdist_group("ec2"))
        if _folder(item) in CAMPAIGNS and not item.get_closest_marker("story"):
            item.add_marker(pytest.mark.campaign)
    done = [item for item in items if item.nodeid in config.stash[passed_before]]
    if done:
        items[:] = [item for item in items if item.nodeid not in config.stash[passed_before]]
        config.hook.pytest_deselected(items=done)


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Counts the tests that only a campaign runs."""
    for item in items:
        if item.get_closest_marker("campaign") and item.config.option.markexpr == STORIES:
            item.config.stash[left_to_campaigns][campaign(item)] += 1


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """Tells the controller of pytest-xdist what this worker has left out. That all has passed before is no failure."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        left = session.config.stash[left_to_campaigns]
        output[LEFT] = dict(left)
    elif session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and session.config.stash[passed_before]:
        session.exitstatus = pytest.ExitCode.OK
    return (yield)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Takes over what a worker has left out; all of them leave out the same tests."""
    node.config.stash[left_to_campaigns] = Counter(getattr(node, "workeroutput", {}).get(LEFT, {}))


class Passed:
    """Writes down each test that has passed, its setup and its clearing away included."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._passed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Takes a report of a test's setup, call or teardown."""
        if report.when == "call" and report.passed:
            self._passed.add(report.nodeid)
        if report.when == "teardown" and report.passed and report.nodeid in self._passed:
            # pytest-xdist adds "@GROUP"; the parameters of a test end with a bracket.
            name = re.sub(r"@[^\]@]+$", "", report.nodeid)
            with self._path.open("a") as file:
                file.write(f"{name}\n")


class Failures:
    """Shows each failure as soon as it happens: the end of the run may be far away."""

    def __init__(self, reporter: Any) -> None:
        self._reporter = reporter

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Takes a report of a test's setup, call or teardown."""
        if report.failed:
            reason = [line for line in report.longreprtext.splitlines() if line.startswith("E ")]
            self._reporter.write_line("\n".join(["", f"FAILED {report.nodeid} ({report.when})", *reason[:20]]))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Begins to write down what passes and what fails, in the controller of pytest-xdist."""
    if hasattr(session.config, "workerinput"):
        return
    plugins = session.config.pluginmanager
    plugins.register(Failures(plugins.get_plugin("terminalreporter")))
    if path := os.environ.get(PASSED):
        plugins.register(Passed(Path(path)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says what is left to the campaigns."""
    left = terminalreporter.config.stash[left_to_campaigns]
    if left:
        counts = ", ".join(f"{name} {count}" for name, count in sorted(left.items()))
        terminalreporter.write_line(f"left to campaigns (scripts/test NAME): {counts}")
