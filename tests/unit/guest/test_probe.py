"""Tests the probe program as the controller runs it: from stdin, with a few targets here. tests/local runs it whole."""

from __future__ import annotations

import errno
import importlib.util
import json
import socket
import subprocess
import sys
import time
from types import ModuleType
from typing import Any

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


def run(*probes: list[Any], cards: tuple[str, ...] = ()) -> list[list[str]]:
    """Runs the program from memory, as root's probes, and returns the answers."""
    request = {"word": "w", "cards": cards, "probes": {"root": probes}}
    program = (GUEST / "probe.py").read_text() + f"\n\nmain(json.loads({json.dumps(request)!r}))\n"
    done = subprocess.run([sys.executable, "-I", "-"], input=program.encode(), capture_output=True, check=True)
    word, answers = json.loads(done.stdout)
    assert word == "w"
    return list(answers)


def test_it_answers_every_probe_once_in_the_order_of_the_questions() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        answers = run(
            ["open", None, "tcp", "127.0.0.1", port],
            ["by name", None, "tcp_by_name", ["nothing.invalid", 1], ["localhost", port]],
            ["knock", None, "knock", "127.0.0.1", port, "secret"],
            ["closed", None, "tcp", "127.0.0.1", 1],
            ["unknown name", None, "resolve", "nothing.invalid"],
        )
    assert [(user, name, outcome) for user, name, outcome, _ in answers] == [
        ("root", "open", "reached"),
        ("root", "by name", "reached"),
        ("root", "knock", "reached"),
        ("root", "closed", "not reached"),
        ("root", "unknown name", "not reached"),
    ]


def test_what_cannot_be_sent_is_no_answer_that_counts() -> None:
    nowhere = "nowhere.invalid"  # no card leads to it, so no route is made
    answers = run(["no card", nowhere, "tcp", "127.0.0.1", 1], ["no method", None, "teleport"], cards=(nowhere,))
    assert [outcome for _, _, outcome, _ in answers] == ["impossible", "impossible"]


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), "not reached"),
        (OSError(errno.ENETUNREACH, "no route"), "not reached"),
        (TimeoutError("timed out"), "not reached"),
        (socket.gaierror(-3, "no resolver"), "not reached"),
        (OSError(errno.ENODEV, "no device"), "impossible"),
        (PermissionError(errno.EPERM, "a firewall"), "impossible"),
        (OSError(errno.EMFILE, "no descriptors"), "impossible"),
        (ValueError("anything else"), "impossible"),
    ],
    ids=["refused", "unreachable", "timeout", "resolver", "device", "permission", "descriptors", "other"],
)
def test_only_what_the_network_says_counts_as_not_reached(probe: ModuleType, error: Exception, outcome: str) -> None:
    assert probe._outcome(error) == outcome


def test_a_probe_that_never_answers_counts_as_not_reached(probe: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "SECONDS", 0.05)
    monkeypatch.setitem(probe.METHODS, "sleep", lambda _: time.sleep(5))
    assert probe._try_all([["slow", None, "sleep"]], {}, "root") == [["root", "slow", "not reached", "no answer"]]
