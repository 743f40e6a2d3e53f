"""Tests signals by sending them to a real process."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from provisioner.base.signals import SIGNALS, Interrupts, wait
from tests.waiting import BOUND_SECONDS

ROOT = Path(__file__).parents[3]
# It never blocks for long: Python runs no handler of a signal that comes just before a call that blocks.
PROGRAM = """
    import os, select, sys, time
    from provisioner.base.signals import Interrupts

    def tell(text):
        os.write(1, f"{text}\\n".encode())  # print() in a handler may find its buffer in use

    interrupts = Interrupts(tell)
    interrupts.install()
    try:
        tell("working")
        while True:
            time.sleep(0.02)
    except KeyboardInterrupt as stop:
        tell(f"stopped by {stop}")
        try:
            with interrupts.shield():
                tell("cleaning")
                while not select.select([sys.stdin], [], [], 0.02)[0]:
                    pass
        except KeyboardInterrupt:
            tell("left at once")
            sys.exit(3)
        tell("clean")
"""


@contextmanager
def process() -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-c", textwrap.dedent(PROGRAM)]
    with subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        try:
            yield started
        finally:
            started.kill()


def line(started: subprocess.Popen[str]) -> str:
    assert started.stdout
    return started.stdout.readline().strip()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_second_signal_does_not_cut_the_clean_up_short(number: signal.Signals) -> None:
    with process() as started:
        assert line(started) == "working"
        started.send_signal(number)
        assert [line(started), line(started)] == [f"stopped by {number.name}", "cleaning"]
        started.send_signal(number)
        assert line(started).startswith("Cleaning up; 2 more to quit at once")
        assert started.stdin
        started.stdin.write("\n")
        started.stdin.flush()
        assert line(started) == "clean"
        assert started.wait(BOUND_SECONDS) == 0


def test_a_second_signal_ends_the_process() -> None:
    with process() as started:
        assert line(started) == "working"
        started.send_signal(signal.SIGINT)
        assert [line(started), line(started)] == ["stopped by SIGINT", "cleaning"]
        for left in (2, 1):
            started.send_signal(signal.SIGINT)
            assert line(started).startswith(f"Cleaning up; {left} more")
        started.send_signal(signal.SIGINT)
        assert line(started) == "left at once"
        assert started.wait(BOUND_SECONDS) == 3


def test_a_wait_ends_at_once_when_the_check_says_so() -> None:
    class Stopped(Exception):
        pass

    calls: list[int] = []

    def check() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise Stopped

    with pytest.raises(Stopped):
        wait(60, check)
    wait(0, check)
    assert len(calls) == 2


@pytest.mark.parametrize("hidden_in", ["class", "finalizer", "callback", "generator"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_where_python_hides_errors_is_postponed(hidden_in: str, number: signal.Signals) -> None:
    program = f"""
        import os, signal, sys, time, weakref
        from provisioner.base.signals import Interrupts

        def send(*_):
            os.kill(os.getpid(), {int(number)})
            for _ in range(1000):  # Python handles a signal between two instructions
                pass

        class Field:
            def __set_name__(self, owner, name):
                send()

        class Finalized:
            def __del__(self):
                send()

        class Referred:
            pass

        def generate():
            try:
                yield
            finally:
                send()

        Interrupts(print).install()
        try:
            if sys.argv[1] == "class":
                type("Made", (), {{"field": Field()}})
            elif sys.argv[1] == "finalizer":
                Finalized()
            elif sys.argv[1] == "generator":
                next(generate())
            else:
                referred = Referred()
                kept = weakref.ref(referred, send)
                del referred
            while True:
                time.sleep(0.02)
        except KeyboardInterrupt as stop:
            print(stop)
    """
    argv = [sys.executable, "-c", textwrap.dedent(program), hidden_in]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=BOUND_SECONDS, check=False)
    assert (done.stdout, done.stderr) == (f"{number.name}\n", "")


def test_a_signal_that_cannot_be_postponed_interrupts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    class Field:
        def __set_name__(self, owner: type, name: str) -> None:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("_thread.start_new_thread", refuse)
    monkeypatch.setattr("sys.unraisablehook", sys.unraisablehook)
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        Interrupts(print).install()
        with pytest.raises((KeyboardInterrupt, RuntimeError)):  # Python 3.11 wraps it
            type("Made", (), {"field": Field()})
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
