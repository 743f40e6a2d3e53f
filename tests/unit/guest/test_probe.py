"""Tests the probe program as the controller runs it: from stdin, with a few targets here. tests/local runs it whole."""

from __future__ import annotations

import contextlib
import errno
import json
import select
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sent import probe

from provisioner.clouds.guest_files import SENT
from tests.unit.fakes.exec_call import GUEST_PYTHON

Pair = tuple[socket.socket, socket.socket]
Attempt = Iterator[tuple[int, int, None]]


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
            ["refused", False, None, "answer", "127.0.0.1", 1],
            ["answered", False, None, "answer", "127.0.0.1", port],
            ["unknown name", False, None, "resolve", "nothing.invalid"],
        )
    assert [(user, name, outcome) for user, name, outcome, _ in answers] == [
        ("root", "open", "reached"),
        ("root", "by name", "reached"),
        ("root", "knock", "reached"),
        ("root", "closed", "not reached"),
        ("root", "refused", "reached"),
        ("root", "answered", "reached"),
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
def test_any_text_that_the_network_says_is_an_answer(text: str) -> None:
    assert json.loads(probe._text(text)) == text


def test_only_what_the_network_says_counts_as_not_reached() -> None:
    said = [OSError(number, "") for number in (errno.ECONNREFUSED, errno.ENETUNREACH)]
    said += [TimeoutError(), *(socket.gaierror(number, "") for number in (socket.EAI_AGAIN, socket.EAI_NONAME))]
    assert [probe._outcome(error) for error in said] == ["not reached"] * 5
    other = [OSError(number, "") for number in (errno.ENODEV, errno.EPERM, errno.EMFILE)]
    other += [socket.gaierror(number, "") for number in (socket.EAI_MEMORY, socket.EAI_SYSTEM)]
    assert [probe._outcome(error) for error in (*other, ValueError())] == ["impossible"] * 6


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def silence(pair: Pair) -> Attempt:
    """Waits for what never comes."""
    yield pair[0].fileno(), select.POLLIN, None


def answer_of(attempt: Callable[[], Attempt], *, repeated: bool = False) -> tuple[str, str]:
    """Returns the outcome and the detail of a probe that is not promised."""
    with pytest.MonkeyPatch.context() as patch:
        for methods in (probe.METHODS, probe.REPEATED) if repeated else (probe.METHODS,):
            patch.setitem(methods, "method", lambda _: attempt())
        [(name, *answer)] = probe.Probes({}).try_all([["name", False, None, "method"]])
    assert name == "name"
    return answer[0], answer[1]


def test_a_probe_that_nothing_answers_counts_as_not_reached(pair: Pair) -> None:
    begin = time.monotonic()
    assert answer_of(lambda: silence(pair)) == ("not reached", "timed out")
    assert time.monotonic() - begin > probe.SECONDS - 0.1


def test_what_only_the_second_attempt_reaches_is_reached(pair: Pair) -> None:
    attempts: list[int] = []

    def refused_at_first() -> Attempt:
        attempts.append(len(attempts))
        if attempts == [0]:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")
        pair[1].send(b"hello")
        yield pair[0].fileno(), select.POLLIN, None

    assert answer_of(refused_at_first, repeated=True)[0] == "reached"
    assert attempts == [0, 1]


def test_a_probe_that_comes_to_no_end_is_no_answer_that_counts(monkeypatch: pytest.MonkeyPatch, pair: Pair) -> None:
    def chatter() -> Attempt:
        pair[1].send(b"other")
        while True:
            yield pair[0].fileno(), select.POLLIN, None

    monkeypatch.setattr(probe, "LONGEST_SECONDS", 0.3)
    assert answer_of(chatter) == ("impossible", "no answer in time")


def test_a_machine_without_a_processor_waits_for_longer(monkeypatch: pytest.MonkeyPatch, pair: Pair) -> None:
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
    assert answer_of(lambda: silence(pair)) == ("reached", "None")


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (b"HTTP/1.1 403 Forbidden\r\n", "not reached"), (b"HTTP/1.1 401 Unauthorized\r\n", "reached"),
        (b"HTTP/1.1 200 OK\r\n", "reached"), (b"", "not reached"),
    ],
    ids=["switched off", "asks for a token", "answers", "closes without an answer"],
)  # fmt: skip
def test_the_metadata_service_is_reached_if_it_answers(
    monkeypatch: pytest.MonkeyPatch, answer: bytes, outcome: str
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
