"""The commands `replay` and `verify`: what was recorded of an environment, and whether it is still what was sealed."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from provisioner.base.errors import ProvisionerError, UsageError
from provisioner.base.models import Environment
from provisioner.base.printable import PrintableStream, printable
from provisioner.base.validation import shown
from provisioner.cli.command import command
from provisioner.cli.home import default_home
from provisioner.cli.options import PastEnvironmentArgument
from provisioner.cli.output import Result, show
from provisioner.machines.recordings import record_hash
from provisioner.recording import calls, casts, published
from provisioner.recording.manifest import MANIFEST
from provisioner.store.environments import EnvironmentStore

# Of all that is shown with --json.
JSON_BYTES = 8 << 20
# A recorded pause is not waited for any longer.
PAUSE_SECONDS = 2.0


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    command(app, "replay")(replay)
    command(app, "verify")(verify)


def replay(
    env: PastEnvironmentArgument,
    part: Annotated[
        str | None,
        typer.Option("--part", metavar="NAME", help="Only this one. Default: all terminals.", show_default=False),
    ] = None,
    speed: Annotated[float, typer.Option("--speed", metavar="N", help="How many times as fast.", min=0.01)] = 1.0,
    as_json: bool = False,
) -> Result:
    """Replays what the terminals showed, with its pauses on a terminal, and made printable: no sequence controls it."""
    if not math.isfinite(speed):
        raise UsageError("--speed must be a number.")
    store = EnvironmentStore(default_home())
    environment = store.find(env, archived=True)
    chosen = _chosen(environment, store.logs(environment.id), part)
    if as_json:
        return _as_json(environment, chosen)
    wait: Callable[[float], None] = partial(_wait, speed) if sys.stdout.isatty() else lambda _: None
    for path in chosen:
        try:
            if path.suffix == casts.SUFFIX:
                _play(path, wait)
            else:
                for row in calls.rows_of(path):
                    show(f"{printable(calls.in_words(row))}\n")
        except BrokenPipeError:  # of the output, as after `| head`
            raise
        except (OSError, ValueError) as error:
            raise ProvisionerError(f"{path} cannot be read further: {error}.") from error
    return Result({})


def _chosen(environment: Environment, directory: Path, part: str | None) -> Sequence[Path]:
    """Returns the files to show: all terminals by their times, or the one that is asked for."""
    parts = casts.parts_of(directory)
    names = ", ".join(path.stem for path in parts)
    chosen = [path for path in parts if (path.suffix == casts.SUFFIX if part is None else path.stem == part)]
    if not chosen:
        what = "recording of a terminal" if part is None else f"recording {part!r}"
        raise UsageError(f"{environment.id} has no {what}.", hint=f"It has: {names}." if names else None)
    return chosen


def _wait(speed: float, seconds: float) -> None:
    time.sleep(min(seconds / speed, PAUSE_SECONDS))


def _play(path: Path, wait: Callable[[float], None]) -> None:
    header = casts.header_of(path)
    show(f"==> {printable(path.stem)}: {printable(header.command) or printable(header.title)} <==\n")
    stream, last = PrintableStream(), 0.0
    for event in casts.events_of(path):
        wait(event.seconds - last)
        last = event.seconds
        if event.kind == casts.OUTPUT:
            show(stream.feed(event.text.encode("utf-8", "replace")))
        elif event.kind == casts.MARKER:
            show(f"\n[{printable(event.text)}]\n")
    show(f"{stream.flush()}\n")


def _as_json(environment: Environment, chosen: Sequence[Path]) -> Result:
    """Returns all of it as it was recorded, up to a bound."""
    parts: list[dict[str, Any]] = []
    left_bytes = JSON_BYTES
    for path in chosen:
        is_terminal = path.suffix == casts.SUFFIX
        part: dict[str, Any] = {"part": path.stem, "file": str(path), "cut": False, "damaged": ""}
        rows: list[Any] = []
        part["events" if is_terminal else "rows"] = rows
        try:
            if is_terminal:
                header = casts.header_of(path)
                part |= {"command": header.command, "begun_at": header.timestamp}
            for row in casts.events_of(path) if is_terminal else calls.rows_of(path):
                value = [row.seconds, row.kind, row.text] if isinstance(row, casts.Event) else row
                left_bytes -= len(str(value))
                if left_bytes < 0:
                    part["cut"] = True
                    break
                rows.append(value)
        except (OSError, ValueError) as error:
            part["damaged"] = str(error)
        parts.append(part)
    return Result({"environment": environment.id, "parts": parts})


def verify(
    what: Annotated[
        str,
        typer.Argument(
            metavar="WHAT", help="An environment that was destroyed, a file of results, or a directory of sealed logs."
        ),
    ],
) -> Result:
    """Compares logs with what was sealed, and results with the logs; says which file is not as it was."""
    checked, directory = _checked(what)
    is_sealed = (directory / MANIFEST).is_file()
    wrong = [(each, problem) for each in checked for problem in each.problems]
    lines = [f"{each.name}: {problem.file}: {problem.message}" for each, problem in wrong]
    for each in (each for each in checked if not each.problems):
        lines.append(f"{each.name}: {each.files} files as sealed, hash {each.head}")
        lines += [f"{each.name}: {each.isolation}"] if each.isolation else []
    if not is_sealed and Path(what).is_file():
        lines.append(
            f"{what}: no seal beside it, so that missing rows, and outcomes, agents, repetitions and costs, were not "
            "checked"
        )
    data = {
        "verified": bool(checked) and not wrong,
        "sealed": is_sealed,
        "checked": [asdict(each) for each in checked],
    }
    if not checked:
        lines.append("Nothing to check: no run has a score or a recording.")
    return Result(data, "\n".join(lines), 0 if data["verified"] else ProvisionerError.exit_code)


def _checked(what: str) -> tuple[list[published.Checked], Path]:
    """Returns what came of the check, and the directory in which the manifest should be."""
    store = EnvironmentStore(default_home())
    path = Path(what)
    if what and path.is_file():
        try:
            return published.check_results(path, partial(_logs_of, store, path.parent)), path.parent
        except (OSError, ValueError) as error:
            raise UsageError(f"{what} cannot be checked: {error}.") from error
    if what and (path / MANIFEST).is_file():
        return [published.check_directory(what, path)], path
    try:
        environment = store.find(what, archived=True)
    except UsageError as error:
        if not path.exists() and os.sep in what:
            raise UsageError(
                f"There is no file or directory {shown(what)}.",
                hint=f"The results of batches are in {default_home().batches}, in a directory for each.",
            ) from error
        if not what or not path.is_dir():
            raise
        raise UsageError(
            f"The directory {what} holds no sealed logs: it has no {MANIFEST}.",
            hint="Give a directory of an environment's logs, a results.jsonl, or an environment's id.",
        ) from error
    if store.exists(environment.id):
        raise UsageError(f"{environment.id} is sealed once it is destroyed.")
    said = {"record": record_hash(environment)}
    logs = store.archived_logs(environment.id)
    return [published.check_directory(environment.id, logs, environment.recording, said, "environment.json")], logs


def _logs_of(store: EnvironmentStore, beside: Path, name: str) -> list[Path]:
    """Returns where the logs of an environment may be: beside the results, or in this home's archive."""
    roots = {beside / name / "logs": beside, beside / name: beside, store.archived_logs(name): None}
    return [path for path, root in roots.items() if root is None or _real(path).is_relative_to(_real(root))]


def _real(path: Path) -> Path:
    """Returns where a path leads; one that leads in a circle is no error, as it is for Path.resolve()."""
    return Path(os.path.realpath(path))
