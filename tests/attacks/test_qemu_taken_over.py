"""A machine takes its QEMU over, and QEMU's control socket answers what the machine likes.

A caller of QEMU gets an error in a bounded time, and no unexpected exception.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path

import pytest
from hypothesis import strategies as st

from provisioner.clouds.local.vm import machine_logs, qemu, shutdown
from provisioner.ssh import namespace_program
from provisioner.store.files import read_end
from tests.attacks.fuzzing import damaged, fuzz
from tests.waiting import BOUND_SECONDS

GREETING = b'{"QMP": {}}\n{"return": {}}\n'
EVENT = b'{"event": "RESET"}\n'
STATUS = b'{"return": {"status": "io-error"}}\n'
SHUTDOWN = b'{"event": "SHUTDOWN", "data": {"guest": true, "reason": "guest-shutdown"}}\n'
ERROR = b'{"error": {"class": "GenericError", "desc": "no"}}\n'

ANSWERS = {
    "deep": GREETING + b"[" * 100_000 + b"\n",
    "deep_object": GREETING + b'{"a":' * 100_000 + b"\n",
    "number": GREETING + b"1\n",
    "list": GREETING + b'["return"]\n',
    "error": GREETING + b'{"error": [1]}\n',
    "digits": GREETING + b"9" * 5000 + b"\n",
    "bytes": GREETING + b"\xff\n",
    "empty": GREETING + b"\n",
    "long": GREETING + b"x" * (3 << 20),
    "long_greeting": b"x" * (3 << 20),
    "ends": GREETING,
}


@contextlib.contextmanager
def answering(directory: Path, chunks: Iterator[bytes], pause_seconds: float = 0.0) -> Iterator[None]:
    """Listens as QEMU does, and sends what it is told to each client."""

    def send() -> None:
        with contextlib.suppress(OSError), server.accept()[0] as client:
            for chunk in chunks:
                client.sendall(chunk)
                time.sleep(pause_seconds)

    with socket.socket(socket.AF_UNIX) as server:
        (directory / qemu.RUN).mkdir(exist_ok=True)
        server.bind(str(directory / qemu.CONTROL))
        server.listen()
        thread = threading.Thread(target=send)
        thread.start()
        yield
        thread.join(BOUND_SECONDS)
        (directory / qemu.CONTROL).unlink()
    assert not thread.is_alive()


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path()


def ask(directory: Path) -> str:
    with qemu.QMP(directory, timeout_seconds=1) as qmp:
        return qmp.monitor("info network")


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_an_answer_that_is_none_of_qemus_is_an_error(directory: Path, answer: bytes) -> None:
    with answering(directory, iter([answer])), pytest.raises((qemu.QMPError, OSError)) as refused:
        ask(directory)
    assert len(str(refused.value)) < 1000
    with answering(directory, iter([answer])):
        assert not qemu.paused_by_full_disk(directory)


@pytest.mark.parametrize(
    ("chunks", "pause_seconds"),
    [((EVENT * 1000), 0.0), (EVENT, 0.2), (b" ", 0.2)],
    ids=["flood", "events", "drops"],
)
def test_events_without_end_are_listened_to_for_a_bounded_time(
    directory: Path, chunks: bytes, pause_seconds: float
) -> None:
    def endless() -> Iterator[bytes]:
        yield GREETING
        yield from repeat(chunks)

    with answering(directory, endless(), pause_seconds), pytest.raises((TimeoutError, qemu.QMPError)):
        ask(directory)


@pytest.fixture(params=["link", "pipe"])
def replace(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], None]:
    """Puts something else in a file's place, as the QEMU of an ordinary user can in its own directory."""
    secret = tmp_path_factory.mktemp("home") / "secret"
    secret.write_text(json.dumps({"event": "SHUTDOWN", "data": {"guest": True, "reason": "a secret"}}) + "\n")

    def put(path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        path.symlink_to(secret) if request.param == "link" else os.mkfifo(path)

    return put


def test_what_it_puts_in_its_logs_place_is_neither_followed_nor_waited_for(
    directory: Path, replace: Callable[[Path], None]
) -> None:
    for name in (machine_logs.SERIAL, shutdown.EVENTS, qemu.PIDFILE):
        replace(directory / name)
    with pytest.raises(OSError, match=r"plain file|symbolic links"):
        read_end(directory / machine_logs.SERIAL, 1000)
    assert "a secret" not in shutdown.reason(directory)[0]
    assert qemu.live_pid(directory / qemu.PIDFILE) is None
    with pytest.raises(OSError, match=r"process has ended|symbolic links"):
        namespace_program.holder(str(directory / qemu.PIDFILE))


def test_a_link_to_the_socket_of_another_machine_is_not_followed(directory: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with answering(other, iter([GREETING])):
        replaced = directory / qemu.CONTROL
        replaced.parent.mkdir()
        replaced.symlink_to(other.resolve() / qemu.CONTROL)
        with pytest.raises(OSError, match=r"refused|symbolic links"):
            ask(directory)
        with pytest.raises((qemu.QMPError, OSError)):
            ask(other)  # it listens


def test_random_events_explain_no_end_or_give_a_short_reason() -> None:
    def check(events: bytes) -> None:
        reason, _ = shutdown.explain(events, 1, 1, rebooted=False)
        assert 0 < len(reason) < 300

    fuzz(damaged(GREETING + EVENT + SHUTDOWN) | st.binary(max_size=200), check)


def test_random_answers_are_answers_or_errors(directory: Path) -> None:
    def check(answer: bytes) -> None:
        with answering(directory, iter([answer])):
            assert qemu.paused_by_full_disk(directory) in (True, False)

    fuzz(damaged(GREETING + EVENT + STATUS, GREETING + ERROR), check)
