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

from provisioner.signals import interrupt_in, wait
from tests.waiting import BOUND_SECONDS

ROOT = Path(__file__).parents[2]
# It never blocks for long: Python runs no handler of a signal that comes just before a call that blocks.
PROGRAM = """
    import os, select, sys, time
    from provisioner.signals import Interrupts

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


def test_an_interruption_is_found_in_what_wraps_it() -> None:
    interrupt = KeyboardInterrupt("SIGTERM")
    wrapped, twice, other = RuntimeError("Error calling __set_name__"), ImportError("fam"), OSError("no")
    wrapped.__cause__, twice.__cause__, other.__cause__ = interrupt, wrapped, other
    assert [interrupt_in(error) for error in (interrupt, wrapped, twice)] == [interrupt] * 3
    assert [interrupt_in(error) for error in (other, ValueError("no"))] == [None, None]
