"""A plugin of pytest for Inspect's own tests: those of a docker sandbox run with this provider in docker's place.

`scripts/inspects-own-tests` uses it. Tests that need no docker sandbox are left out: they show nothing of a provider.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Generator

import anyio
import pytest
from inspect_ai.model import _model
from inspect_ai.util._sandbox.docker import docker
from inspect_ai.util._sandbox.registry import sandboxenv_register

from provisioner.inspect.sandbox import ProvisionerSandbox
from provisioner.store.home import Home
from tests.homes import borrow_images, cache
from tests.inspect.images import registry_with_python

# Why Inspect's tests skip themselves where Docker is not installed.
NO_DOCKER = "Test doesn't work without Docker installed."
API = "they need a model provider's key"
FLAKY = "Inspect leaves them out itself, as unreliable"
HOST = "they call the docker command of this computer"
IMAGE = "they need an image of the Docker Hub that has no stand-in"
INTERNALS = "they look at the docker sandbox's own files or words"
OTHER_VERSION = "their files were written for another version of Inspect"
CONTAINER = "they end the container itself: a machine has no such process, and its calls need no program of it"
FIND = "GNU find takes -delete for an action after --, too: Inspect's tool fails in each Debian"
REPAIRS = "they expect a directory of mode 0755 to be mended: Inspect 0.3.285 refuses it"
PROPOSED = "they call a host's tool that no model proposed: Inspect 0.3.285 refuses that"
# What is left out, by regular expressions of the tests' names.
LEFT_OUT = {
    r"test_agent_human|test_checkpoint_": HOST,
    r"test_web_browser|test_mcp_server_sandbox_nodejs|_alpine": IMAGE,
    r"test_compose_project_create|test_compose_config_|test_sandbox_dockerfile_raises": INTERNALS,
    r"test_broken_sandbox_is_reported|test_non_tool_callers_get": CONTAINER,
    r"test_list_files_dash_path_safe": FIND,
    r"test_eval_retry_resolves_relative_sandbox_paths": IMAGE,
    r"test_sandbox_service_nonroot_after_root_setup": REPAIRS,
    r"test_tools_bridge.*test_(single_tool|multiple_tools|multiple_bridged|content_returning)": PROPOSED,
}

Collecting = Generator[None, pytest.CollectReport, pytest.CollectReport]
left_out = pytest.StashKey[Counter[str]]()


class Provider(ProvisionerSandbox):
    """The provider, which is registered by docker's name beside its own."""


def pytest_configure(config: pytest.Config) -> None:
    """Puts the provider in the place of Inspect's own class, for evals and for tests that import it."""
    patch = pytest.MonkeyPatch()
    # By the name that Inspect's own class has: a test names it, or imports the class.
    sandboxenv_register(Provider, "inspect_ai/docker")
    patch.setattr(docker, "DockerSandboxEnvironment", Provider)
    # Otherwise Inspect downloads a table of tokens for models that do not say how many they used.
    patch.setattr(_model, "count_text_tokens", len)
    kept = Home(cache())
    kept.make()
    patch.setenv("PROVISIONER_HOME", str(borrow_images(kept, kept.root / "workers" / "inspects").root))
    settings = cache() / "inspects.json"
    settings.write_text(json.dumps({"registry": registry_with_python()}))
    patch.setenv("PROVISIONER_INSPECT", str(settings))
    config.stash[left_out] = Counter()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Collecting:
    """Leaves out files that cannot be imported with the installed Inspect."""
    report = yield
    if report.failed and "ImportError while importing" in report.longreprtext:
        collector.config.stash[left_out][OTHER_VERSION] += 1
        return pytest.CollectReport(report.nodeid, "passed", None, [])
    return report


@pytest.hookimpl(tryfirst=True)  # Inspect's own hook repeats what fails, and ends what takes five minutes
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Function]) -> None:
    """Selects the tests, takes away that they are skipped without Docker, and has each run once, without a limit."""
    patch = pytest.MonkeyPatch()
    reasons = {item: _reason(item) for item in items}
    config.stash[left_out] += Counter(reason for reason in reasons.values() if reason not in ("", NO_DOCKER))
    config.hook.pytest_deselected(items=[item for item, reason in reasons.items() if reason])
    items[:] = [item for item, reason in reasons.items() if not reason]
    for item in items:
        item.own_markers = [mark for mark in item.own_markers if mark.kwargs.get("reason") != NO_DOCKER]
        for name in ("_flaky_retry", "_has_default_timeout"):
            patch.setattr(item.function, name, True, raising=False)


def _reason(item: pytest.Item) -> str:
    """Returns why a test is left out; empty if it runs."""
    if not any(mark.kwargs.get("reason") == NO_DOCKER for mark in item.iter_markers("skipif")) or "[trio" in item.name:
        return NO_DOCKER
    for mark, reason in (("api", API), ("flaky", FLAKY)):
        if item.get_closest_marker(mark):
            return reason
    return next((reason for names, reason in LEFT_OUT.items() if re.search(names, item.nodeid)), "")


def pytest_sessionfinish() -> None:
    """Destroys what tests have left: some ask for it."""
    anyio.run(ProvisionerSandbox.cli_cleanup, None)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says what was left out, and why."""
    for reason, count in sorted(terminalreporter.config.stash[left_out].items()):
        if count:
            terminalreporter.write_line(f"left out: {count}, as {reason}")
