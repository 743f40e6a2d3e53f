"""Tells one process from a later one with the same number. Standard library only."""

from __future__ import annotations

from pathlib import Path


def start_time(pid: int) -> str | None:
    """Returns a process's start time in clock ticks, which with its number identifies it; None if it has ended."""
    try:
        return _stat(pid)[19]  # field 22
    except OSError:
        return None


def is_alive(pid: int, started: str) -> bool:
    """Returns whether a process lives, if only by one of its threads.

    Args:
        pid, started: its number and its start time.
    """
    try:
        fields = _stat(pid)
    except OSError:
        return False
    # A process looks like a zombie once its first thread has exited, even if others run: fields 3 and 20.
    return fields[19] == started and (fields[0] not in ("Z", "X") or int(fields[17]) > 1)


def is_stopped(pid: int) -> bool:
    """Returns whether a signal has stopped a process until another one continues it."""
    try:
        return _stat(pid)[0] == "T"
    except OSError:
        return False


def _stat(pid: int) -> list[str]:
    """Returns the fields of proc(5)'s /proc/PID/stat from the third one on; before that is a name, of any bytes.

    Raises:
        OSError: the process has ended.
    """
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
