"""The command line's entry point: from its first instruction on, a signal ends the process without a traceback.

It imports nothing that takes time, so that this holds while the rest is imported.
"""

from __future__ import annotations

import sys

_previous = sys.excepthook


def _quiet(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Shows no traceback of a Ctrl-C that comes before signals are handled, or after. Python then ends by SIGINT."""
    if kind is not KeyboardInterrupt:
        _previous(kind, error, trace)


# First of all, since importing signal takes milliseconds.
sys.excepthook = _quiet

import os  # noqa: E402
import signal  # noqa: E402
from types import FrameType, TracebackType  # noqa: E402


def main() -> int:
    """Runs the command line.

    Returns:
        The exit code. A process that Ctrl-C or SIGTERM ends has 128 and the signal's number: 130 or 143.
    """
    _end_at_signals()
    try:
        from provisioner.cli import app

        # Commands handle signals themselves while they may have something to clear away.
        return app.main()
    finally:
        _end_at_signals()


def _end_at_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)


def _end(number: int, _: FrameType | None) -> None:
    os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
