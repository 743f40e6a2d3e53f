"""The command `logs`: all logs of an environment, one of them, or its end."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from provisioner.base.errors import UsageError
from provisioner.base.models import Environment
from provisioner.base.printable import printable_lines
from provisioner.cli.options import PastEnvironmentArgument
from provisioner.cli.output import Result, table
from provisioner.cli.sessions import session, session_of
from provisioner.environment.outcomes import failed_parts
from provisioner.machines.recordings import keep_logs
from provisioner.session import Session
from provisioner.store.files import read_end

# All logs together: a machine fills each with what costs the most to show.
MAXIMUM_LOGS_BYTES = 8 << 20

_OBJECT = re.compile(r"^\{.*\}$", re.MULTILINE)
_HEADING = re.compile("^==>", re.MULTILINE)


def main(
    env: PastEnvironmentArgument,
    only: Annotated[list[str] | None, typer.Option("--only", metavar="PART", help="Only this log; repeatable.")] = None,
    tail: Annotated[
        int | None, typer.Option("--tail", metavar="N", help="Only the last N lines of each.", min=0)
    ] = None,
    parts: Annotated[bool, typer.Option("--list", help="List the logs and their sizes instead.")] = False,
) -> Result:
    """Shows logs of an environment: first that of what failed."""
    opened = session()
    environment = opened.environments.find(env, archived=True)
    _fetch(opened, environment)
    paths = _ordered(_existing(opened, environment), environment)
    if parts:
        return _list(environment, paths)
    if only:
        hint = f"`provisioner logs {environment.id} --list` lists them."
        for name in sorted({*only} - {path.stem for path in paths}):
            raise UsageError(f"{environment.id} has no log {name!r}.", hint=hint)
        paths = [path for path in paths if path.stem in only]
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
