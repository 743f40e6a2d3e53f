"""Provides the fixtures that all tests with real machines share. Images are cached outside the checkout."""

from __future__ import annotations

import contextlib
import gc
import os
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from pathlib import Path

import pytest
from hypothesis import settings

from provisioner.base.config import load_settings
from provisioner.clouds.local.cloud import LocalCloud
from provisioner.session import Session
from provisioner.store.home import Home
from tests.accelerator import accelerator
from tests.homes import borrow_images, cache
from tests.provider_mirror import override_provider, use_provider_mirror

pytest_plugins = ["tests.campaigns", "tests.aws.ec2.fixture"]


def pytest_configure(config: pytest.Config) -> None:
    """Makes Terraform use a provider mirror if its registry cannot be reached, and lets examples take their time."""
    # pytest 9.1 loses the fixtures of a directory's conftest.py if its files are not named one after the other.
    config.args.sort()
    settings.register_profile("busy host", deadline=None)
    settings.load_profile("busy host")
    use_provider_mirror()
    override_provider(cache())


def pytest_report_header() -> str:
    """Says what machines run under."""
    return f"accelerator: {accelerator(cache())}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says it again: at the beginning there may have been no base image to try it with."""
    terminalreporter.write_line(f"accelerator: {accelerator(cache())}")


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Makes test ids words: a value that is not a short, plain text gets its argument's name and a number."""
    plain = not isinstance(val, str | bytes) or (isinstance(val, str) and re.fullmatch(r"[ -~]{0,60}", val))
    return None if plain else argname


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Alternates tests that boot machines with tests that mostly wait, so that parallel tests share the CPU well.

    What may take longest comes first, then large groups; quick tests come last.
    """
    if long_names := [item.name[:100] for item in items if not re.fullmatch(r"[ -~]{1,200}", item.name)]:
        raise pytest.UsageError(f"Test ids are short words, unlike: {long_names}")
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        marker = item.get_closest_marker("xdist_group")
        groups.setdefault(marker.args[0] if marker else item.nodeid, []).append(item)
    longest_first = sorted(groups.values(), key=lambda group: (max(map(_timeout, group)), len(group)), reverse=True)
    booting = [group for group in longest_first if group[0].get_closest_marker("vm")]
    quick = [group for group in longest_first if {"unit", "attacks", "ec2"} & set(group[0].path.parts)]
    waiting = [group for group in longest_first if group not in booting and group not in quick]
    turns = [group for pair in zip_longest(booting, waiting) for group in pair if group]
    items[:] = [item for group in [*turns, *quick] for item in group]


def _timeout(item: pytest.Item) -> float:
    """The seconds that a test may take, if it says so itself."""
    marker = item.get_closest_marker("timeout")
    return float(marker.args[0]) if marker else 0.0


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    """Gives each test the usual umask: a command that a test runs in this process sets a stricter one."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fails a test that leaves a process, or something that garbage collection finds open: else a later test would."""
    before = children()
    yield
    gc.collect(1)  # what the test has made; a whole collection takes longer than most tests
    left = {pid: command for pid, command in children().items() if pid not in before}
    assert left == {}, "the test left processes that it started"


def children() -> dict[str, str]:
    """Returns this process's children and what they run, without that of multiprocessing, which stays.

    Nor has it those that have ended: garbage collection finds the ones that nothing waits for.
    """
    found: dict[str, str] = {}
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # as nearly always, and far sooner than by /proc
        return found
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            for pid in (thread / "children").read_text().split():
                with contextlib.suppress(OSError):  # another thread has waited for it
                    found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return {pid: text for pid, text in found.items() if text and "multiprocessing.resource_tracker" not in text}


@pytest.fixture(scope="session")
def test_home() -> Home:
    """Returns a provisioner home that keeps its images between test runs. Each pytest-xdist worker has its own."""
    home = Home(cache())
    home.make()
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    return borrow_images(home, home.root / "workers" / worker) if worker else home


@pytest.fixture(scope="session")
def open_session(test_home: Home) -> Iterator[Callable[[Mapping[str, str]], Session]]:
    """Opens sessions on the test home, and checks that nothing exists in it when all tests are over."""

    def open_one(variables: Mapping[str, str]) -> Session:
        return Session(home=test_home, cloud=LocalCloud(test_home, load_settings()), variables=variables)

    before = set(test_home.environments.iterdir())
    yield open_one
    left = set(test_home.environments.iterdir()) - before
    assert left == set(), f"tests left environments behind: {left}"
