"""Provides fixtures and a marker for a family's own tests. Requires the options that name the family and the task."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

FAMILY_OPTION = "--task-standard-task-family-name"
TASK_OPTION = "--task-standard-task-name"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options that name the family and the task."""
    group = parser.getgroup("task-standard", "METR Task Standard")
    group.addoption(FAMILY_OPTION, default="", help="name of the task family under test")
    group.addoption(TASK_OPTION, default="", help="name of the task under test")


def pytest_configure(config: pytest.Config) -> None:
    """Registers the marker."""
    marker = "task_standard_tasks(names): run this test only for the tasks of these names"
    config.addinivalue_line("markers", marker)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test that is marked for other tasks."""
    marker = item.get_closest_marker("task_standard_tasks")
    if marker is None:
        return
    names = [name for argument in marker.args for name in ([argument] if isinstance(argument, str) else argument)]
    task_name = item.config.getoption(TASK_OPTION)
    if task_name not in names:
        pytest.skip(f"for the tasks {', '.join(names)}, not for {task_name!r}")


def _option(request: pytest.FixtureRequest, option: str) -> str:
    value = request.config.getoption(option)
    if not value:
        pytest.fail(f"pytest was not given {option}", pytrace=False)
    return str(value)


@pytest.fixture
def task_family(request: pytest.FixtureRequest) -> Any:
    """Returns the family's class TaskFamily."""
    return importlib.import_module(_option(request, FAMILY_OPTION)).TaskFamily


@pytest.fixture
def task_name(request: pytest.FixtureRequest) -> str:
    """Returns the name of the task under test."""
    return _option(request, TASK_OPTION)


@pytest.fixture
def task(task_family: Any, task_name: str) -> Any:
    """Returns the value of get_tasks() for the task under test."""
    return task_family.get_tasks()[task_name]
