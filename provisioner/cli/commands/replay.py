"""The command `replay`: shows what was recorded of an environment."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from provisioner.base.errors import ProvisionerError, UsageError
from provisioner.base.models import Environment
from provisioner.base.printable import PrintableStream, printable
from provisioner.cli.command import default_home
from provisioner.cli.options import PastEnvironmentArgument
from provisioner.cli.output import Result, show
from provisioner.recording import calls, casts
from provisioner.store.environments import EnvironmentStore

# Of all that is shown with --json.
JSON_BYTES = 8 << 20
# A recorded pause is not waited for any longer.
PAUSE_SECONDS = 2.0


def main(
    env: PastEnvironmentArgument,
    part: Annotated[
        str | None, typer.Option("--part", metavar="NAME", help="Only this one. Default: all terminals.")
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
