"""The command `logs`: all logs of an environment, one of them, its end, or what comes while it runs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Collection, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

from provisioner.base.clock import now
from provisioner.base.errors import UsageError
from provisioner.base.models import Environment
from provisioner.base.printable import PrintableStream, printable_lines
from provisioner.cli.options import PastEnvironmentArgument
from provisioner.cli.output import Result, show, table
from provisioner.cli.sessions import session, session_of
from provisioner.environment.outcomes import failed_parts
from provisioner.machines.recordings import keep_logs
from provisioner.session import Session
from provisioner.store.files import read_end

# All logs together: a machine fills each with what costs the most to show.
MAXIMUM_LOGS_BYTES = 8 << 20
# How often logs are looked at while they are followed, and how often the cloud is asked for consoles.
LOOK_SECONDS = 0.5
CONSOLE_SECONDS = 15.0
# How long after its time to live an environment may be removed by the process that looks after it. Its machines have
# ended by then.
END_GRACE = timedelta(minutes=1)
# A log that was written anew, as consoles are, continues where so many bytes are as before.
OVERLAP_BYTES = 4096
# How much is made printable at once, which costs a string for each line.
PIECE_BYTES = 64 << 10

_OBJECT = re.compile(r"^\{.*\}$", re.MULTILINE)
_HEADING = re.compile("^==>", re.MULTILINE)


def main(
    env: PastEnvironmentArgument,
    only: Annotated[list[str] | None, typer.Option("--only", metavar="PART", help="Only this log; repeatable.")] = None,
    tail: Annotated[
        int | None, typer.Option("--tail", metavar="N", help="Only the last N lines of each.", min=0)
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Keep printing new output until the environment ends.")
    ] = False,
    parts: Annotated[bool, typer.Option("--list", help="List the logs and their sizes instead.")] = False,
    as_json: bool = False,
) -> Result:
    """Shows logs of an environment: first that of what failed."""
    if follow and (as_json or parts):
        raise UsageError("--follow cannot be used with --json or --list.")
    opened = session()
    environment = opened.environments.find(env, archived=True)
    _fetch(opened, environment)
    paths = _ordered(_existing(opened, environment), environment)
    if parts:
        return _list(environment, paths)
    if only and (not follow or _is_over(opened, environment)):
        hint = f"`provisioner logs {environment.id} --list` lists them."
        for name in sorted({*only} - {path.stem for path in paths}):
            raise UsageError(f"{environment.id} has no log {name!r}.", hint=hint)
        paths = [path for path in paths if path.stem in only]
    if follow:
        _follow(opened, environment, frozenset(only or ()), 10 if tail is None else tail)
        return Result({})
    return _shown(environment.id, paths, tail)


def _fetch(opened: Session, environment: Environment) -> None:
    """Fetches the logs that are kept only at the end. They stay apart from those: here, no secret is redacted."""
    if opened.environments.exists(environment.id):
        directory = opened.environments.fetched_logs(environment.id)
        with contextlib.suppress(FileNotFoundError):  # the environment ends meanwhile
            directory.mkdir(mode=0o700, exist_ok=True)
            keep_logs(session_of(environment, opened), environment, directory)


def _existing(opened: Session, environment: Environment) -> list[Path]:
    """Returns the logs; of one that was kept and fetched, the newer. Any of them may go meanwhile."""
    store = opened.environments
    found: dict[str, tuple[int, Path]] = {}
    for directory in (store.logs(environment.id), store.fetched_logs(environment.id)):
        paths: list[Path] = []
        with contextlib.suppress(FileNotFoundError):
            paths += directory.glob("*.log")
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                written = (path.stat().st_mtime_ns, path)
                found[path.stem] = max(written, found.get(path.stem, written))
    return [found[name][1] for name in sorted(found)]


def _ordered(paths: Iterable[Path], environment: Environment) -> list[Path]:
    """Returns the logs: those of what failed, then those of programs, then consoles and Terraform's, which are long."""
    failed = failed_parts(environment)

    def place(path: Path) -> tuple[bool, bool, str]:
        return path.stem not in failed, path.stem.startswith(("console", "terraform")), path.stem

    return sorted(paths, key=place)


def _list(environment: Environment, paths: list[Path]) -> Result:
    failed = failed_parts(environment)
    found = [{"part": path.stem, "bytes": path.stat().st_size, "failed": path.stem in failed} for path in paths]
    rows = [[str(each["part"]), f"{each['bytes']:,}", "failed" if each["failed"] else ""] for each in found]
    return Result({"environment": environment.id, "parts": found}, table(["PART", "BYTES", ""], rows))


def _shown(environment: str, paths: list[Path], tail: int | None) -> Result:
    """Returns logs in their order, or the last lines of each; of those that are too long together, the ends."""
    sizes = {path: path.stat().st_size for path in paths}
    ends: dict[Path, bytes] = {}
    room_bytes = MAXIMUM_LOGS_BYTES
    for path in sorted(sizes, key=sizes.__getitem__):  # shorter ones leave room to longer ones
        ends[path] = read_end(path, room_bytes // (len(sizes) - len(ends)))
        room_bytes -= len(ends[path])
    texts, whole_bytes, shown, empty = {}, {}, [], []
    for path in paths:
        data, heading = ends.pop(path), path.stem
        if sizes[path] > len(data):
            heading += f": its end; all of it is in {path}"
            whole_bytes[path.stem] = sizes[path]
        text = (data if tail is None else last_lines(data, tail)).decode(errors="replace")
        texts[path.stem] = text
        if sizes[path]:
            shown += [f"==> {heading} <==", _in_words(path.stem, text).rstrip(), ""]
        else:
            empty.append(path.stem)
    if empty:
        shown.append(f"Empty: {', '.join(empty)}.")
    return Result({"environment": environment, "logs": texts, "cut": whole_bytes}, "\n".join(shown) or "No logs.")


def _in_words(name: str, text: str) -> str:
    """Returns a log with the messages alone where Terraform wrote lines of JSON (its "Machine-Readable UI")."""
    return _OBJECT.sub(_message, text) if name.startswith("terraform") else text


def _message(line: re.Match[str]) -> str:
    try:
        message = json.loads(line[0])
        said, detail = message["@message"], message.get("diagnostic", {}).get("detail")
        # No line of it may look like the heading of another log.
        return _HEADING.sub("  ==>", printable_lines(f"{said}\n{detail}" if detail else f"{said}"))
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        return line[0]


def last_lines(data: bytes, count: int) -> bytes:
    """Returns the last lines of a log. Makes no list of them: short lines would cost many times the log."""
    begin = len(data) - data.endswith(b"\n") if count else len(data)
    for _ in range(count):
        begin = data.rfind(b"\n", 0, begin)
        if begin < 0:
            return data
    return data[begin + 1 :]


class Followed:
    """Reads a log as it grows, is written anew, or moves to the archive.

    Args:
        tail: how many lines of what is there already to begin with.
    """

    def __init__(self, tail: int) -> None:
        self._tail = tail
        self._offset: int | None = None
        self._last = b""

    def read(self, path: Path) -> bytes:
        """Returns what has come since the last call.

        Args:
            path: where the log is now; it need not exist yet.
        """
        try:
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                if self._offset is None:
                    data = last_lines(read_end(path, MAXIMUM_LOGS_BYTES), self._tail)
                    self._offset = size
                elif size == self._offset:
                    return b""
                else:
                    file.seek(max(self._offset - len(self._last), 0))
                    is_longer = size > self._offset and file.read(len(self._last)) == self._last
                    file.seek(self._offset if is_longer else 0)
                    data = file.read(MAXIMUM_LOGS_BYTES)
                    self._offset = file.tell() if is_longer else size
                    data = data if is_longer else self._after_overlap(data)
        except FileNotFoundError:
            return b""
        self._last = (self._last + data)[-OVERLAP_BYTES:]
        return data

    def _after_overlap(self, data: bytes) -> bytes:
        """Returns what follows the last occurrence of what was shown; the log's end if that was cut out.

        Machines choose both. Python looks for it from the left in linear time, and from the right in a quadratic one.
        """
        found = data[::-1].find(self._last[::-1]) if self._last else -1
        return b"[...]\n" + data[-OVERLAP_BYTES:] if found < 0 else data[len(data) - found :]


def _follow(opened: Session, environment: Environment, only: Collection[str], tail: int) -> None:
    """Prints what comes, made printable, until the environment is gone."""
    followed = FollowedLogs(only, tail)
    asked_at = time.monotonic()
    while not _is_over(opened, environment):
        followed.show(_existing(opened, environment))
        time.sleep(LOOK_SECONDS)
        if time.monotonic() - asked_at > CONSOLE_SECONDS:
            _fetch(opened, environment)
            asked_at = time.monotonic()
    archived = opened.environments.archived_logs(environment.id)
    followed.show(sorted(archived.glob("*.log")) if archived.exists() else _existing(opened, environment))
    followed.end()


def _is_over(opened: Session, environment: Environment) -> bool:
    """Returns whether nothing more will come: it was destroyed, or its time to live ended and no process removes it."""
    if not opened.environments.exists(environment.id):
        return True
    return opened.environments.last_known(environment).expires_at + END_GRACE < now()


class FollowedLogs:
    """Prints what comes in several logs, made printable, each piece below its log's name.

    Args:
        only: the logs to print; empty for all.
        tail: how many lines of what is there already to begin with.
    """

    def __init__(self, only: Collection[str], tail: int) -> None:
        self._only = only
        self._tail = tail
        self._logs: dict[str, tuple[Followed, PrintableStream]] = {}
        self._shown = ""
        self._begun: dict[str, str] = {}  # the beginning of a line, of logs that are shown by whole lines

    def show(self, paths: Iterable[Path]) -> None:
        """Prints what has come since the last call, in these logs."""
        for path in paths:
            if not self._only or path.stem in self._only:
                log, stream = self._logs.setdefault(path.stem, (Followed(self._tail), PrintableStream()))
                data = log.read(path)
                for begin in range(0, len(data), PIECE_BYTES):
                    text = stream.feed(data[begin : begin + PIECE_BYTES])
                    self._print(path.stem, self._whole_lines(path.stem, text))

    def end(self) -> None:
        """Prints what was held back: half a character, half an escape sequence, or half a line of Terraform's."""
        for name, (_, stream) in self._logs.items():
            self._print(name, _in_words(name, self._begun.pop(name, "") + stream.flush()))

    def _whole_lines(self, name: str, text: str) -> str:
        """Returns what can be shown of a log: of Terraform's, whole lines, whose JSON becomes messages.

        A line of over 64 KiB is shown as it is.
        """
        if not name.startswith("terraform"):
            return text
        begun = self._begun.pop(name, "") + text
        lines, end, rest = begun.rpartition("\n")
        if len(rest) > PIECE_BYTES:
            return begun
        self._begun[name] = rest
        return _in_words(name, lines + end)

    def _print(self, name: str, text: str) -> None:
        if not text:
            return
        heading = f"\n==> {name} <==\n" if name != self._shown and len(self._only) != 1 else ""
        self._shown = name
        show(heading + text)
