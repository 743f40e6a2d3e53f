"""Tests the probe program as the controller runs it: from stdin, with a few targets here. tests/local runs it whole."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import json
import select
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from provisioner.clouds.guest_files import SENT
from tests.unit.fakes.exec_call import GUEST_PYTHON


@pytest.fixture
def probe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("probe", SENT / "probe.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*probes: list[Any], cards: tuple[str, ...] = ()) -> list[list[str]]:
    """Runs the program from memory, as root's probes, and returns the answers."""
    request = {"word": "w", "cards": cards, "probes": {"root": probes}}
    program = f"{(SENT / 'probe.py').read_text()}\n\nmain({request!a})\n"
    done = subprocess.run([GUEST_PYTHON, "-I", "-S", "-"], input=program.encode(), capture_output=True, check=True)
    word, answers = json.loads(done.stdout)
    assert word == "w"
    return list(answers)


def test_it_answers_every_probe_once_in_order() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        answers = run(
            ["open", True, None, "tcp", "127.0.0.1", port],
            ["by name", True, None, "tcp_by_name", ["nothing.invalid", 1], ["localhost", port]],
            ["knock", False, None, "knock", "127.0.0.1", port, "secret"],
            ["closed", True, None, "tcp", "127.0.0.1", 1],
            ["unknown name", False, None, "resolve", "nothing.invalid"],
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
    answers = run(
        ["no card", False, nowhere, "tcp", "127.0.0.1", 1],
        ["no method", False, None, "teleport"],
        ["no number", False, None, "udp", "127.0.0.1", "x"],
        cards=(nowhere,),
    )
    assert [outcome for _, _, outcome, _ in answers] == ["impossible"] * 3


@pytest.mark.parametrize("text", ["plain", 'HTTP/1.1 "200"', "a\\b\n\x00\x1b", "\xff\u2028\ud800"], ids=range(4))
def test_any_text_that_the_network_says_is_an_answer(probe: ModuleType, text: str) -> None:
    assert json.loads(probe._text(text)) == text


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), "not reached"),
        (OSError(errno.ENETUNREACH, "no route"), "not reached"),
        (TimeoutError("timed out"), "not reached"),
        (socket.gaierror(socket.EAI_AGAIN, "no resolver"), "not reached"),
        (socket.gaierror(socket.EAI_NONAME, "no such name"), "not reached"),
        (socket.gaierror(socket.EAI_MEMORY, "no memory"), "impossible"),
        (socket.gaierror(socket.EAI_SYSTEM, "no descriptors"), "impossible"),
        (OSError(errno.ENODEV, "no device"), "impossible"),
        (PermissionError(errno.EPERM, "a firewall"), "impossible"),
        (OSError(errno.EMFILE, "no descriptors"), "impossible"),
        (ValueError("anything else"), "impossible"),
    ],
    ids=[
        "refused",
        "unreachable",
        "timeout",
        "resolver",
        "name",
        "resolver-memory",
        "resolver-system",
        "device",
        "permission",
        "descriptors",
        "other",
    ],
)
def test_only_what_the_network_says_counts_as_not_reached(probe: ModuleType, error: Exception, outcome: str) -> None:
    assert probe._outcome(error) == outcome


def silence(pair: tuple[socket.socket, socket.socket]) -> Iterator[tuple[int, int, None]]:
    """Waits for what never comes."""
    yield pair[0].fileno(), select.POLLIN, None


def chatter(pair: tuple[socket.socket, socket.socket]) -> Iterator[tuple[int, int, None]]:
    """Waits for an answer among others, which never end."""
    pair[1].send(b"other")
    while True:
        yield pair[0].fileno(), select.POLLIN, None


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_a_probe_that_nothing_answers_counts_as_not_reached(
    probe: ModuleType, monkeypatch: pytest.MonkeyPatch, pair: tuple[socket.socket, socket.socket]
) -> None:
    monkeypatch.setitem(probe.METHODS, "silence", lambda _: silence(pair))
    begin = time.monotonic()
    assert probe.Probes({}).try_all([["silent", False, None, "silence"]]) == [("silent", "not reached", "timed out")]
    assert time.monotonic() - begin > probe.SECONDS - 0.1


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (b"HTTP/1.1 403 Forbidden\r\n", "not reached"), (b"HTTP/1.1 401 Unauthorized\r\n", "reached"),
        (b"HTTP/1.1 200 OK\r\n", "reached"), (b"", "not reached"),
    ],
    ids=["switched off", "asks for a token", "answers", "closes without an answer"],
)  # fmt: skip
def test_the_metadata_service_is_reached_if_it_answers(
    probe: ModuleType, monkeypatch: pytest.MonkeyPatch, answer: bytes, outcome: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def connected(connection: socket.socket, _: object) -> Iterator[None]:
            connection.setblocking(True)
            connection.connect(server.getsockname())
            yield from ()

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    accepted, _ = server.accept()
                    with accepted:
                        accepted.recv(100)
                        accepted.send(answer)

        monkeypatch.setattr(probe.Socket, "connected", connected)
        threading.Thread(target=serve, daemon=True).start()
        answers = probe.Probes({}).try_all([["metadata", False, None, "metadata", "169.254.169.254"]])
        server.shutdown(socket.SHUT_RDWR)
    assert [found for _, found, _ in answers] == [outcome]


def test_what_only_the_second_attempt_reaches_is_reached(
    probe: ModuleType, monkeypatch: pytest.MonkeyPatch, pair: tuple[socket.socket, socket.socket]
) -> None:
    attempts: list[int] = []

    def refused_at_first(_: object) -> Iterator[tuple[int, int, None]]:
        attempts.append(len(attempts))
        if attempts == [0]:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")
        pair[1].send(b"hello")
        yield pair[0].fileno(), select.POLLIN, None

    monkeypatch.setitem(probe.METHODS, "late", refused_at_first)
    monkeypatch.setitem(probe.REPEATED, "late", refused_at_first)
    assert probe.Probes({}).try_all([["late", False, None, "late"]])[0][:2] == ("late", "reached")
    assert attempts == [0, 1]


def test_a_probe_that_comes_to_no_end_is_no_answer_that_counts(
    probe: ModuleType, monkeypatch: pytest.MonkeyPatch, pair: tuple[socket.socket, socket.socket]
) -> None:
    monkeypatch.setattr(probe, "LONGEST_SECONDS", 0.3)
    monkeypatch.setitem(probe.METHODS, "chatter", lambda _: chatter(pair))
    answers = probe.Probes({}).try_all([["talks", False, None, "chatter"]])
    assert answers == [("talks", "impossible", "no answer in time")]


def test_a_machine_without_a_processor_waits_for_longer(
    probe: ModuleType, monkeypatch: pytest.MonkeyPatch, pair: tuple[socket.socket, socket.socket]
) -> None:
    """Each look at the clock comes a second late, and the answer after three looks."""
    clock, looks = [0.0], [0.0]

    class StarvedTime:
        @staticmethod
        def monotonic() -> float:
            clock[0] += 1
            if len(looks) == 4:
                pair[1].send(b"late")
            looks.append(clock[0])
            return clock[0]

    monkeypatch.setattr(probe, "time", StarvedTime)
    monkeypatch.setitem(probe.METHODS, "silence", lambda _: silence(pair))
    assert probe.Probes({}).try_all([["slow", False, None, "silence"]]) == [("slow", "reached", "None")]
