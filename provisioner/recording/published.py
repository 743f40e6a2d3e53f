"""Checks what was published: a directory of sealed logs, or results that carry the hashes of such directories.

Anyone may have written it: names lead nowhere but below the directories that the caller gives, and what is read is
bounded.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from pydantic import ValidationError

from provisioner.base import strict_json
from provisioner.base.printable import beginning, printable
from provisioner.base.validation import lines_of, shown
from provisioner.recording import isolation
from provisioner.recording.manifest import MANIFEST, Manifest, added, load, problems

RESULTS_BYTES = 256 << 20
ROW_BYTES = 16 << 20
ROWS = 10_000
_NAME = re.compile("[A-Za-z0-9_-]{1,200}")
_HASH = re.compile("[0-9a-f]{64}")
# What a row of results says, and its environment's facts say as well.
AGREED = (
    "environment", "family", "family_version", "task", "images", "agent_files", "score", "status", "record",
)  # fmt: skip
SHOWN_CHARACTERS = 200
# So many are named of one directory; the others are counted.
MAXIMUM_PROBLEMS = 100
# How a run ends that had a machine, and so has sealed logs.
RAN = ("scored", "agent_failed", "timed_out")


@dataclass(frozen=True)
class Problem:
    """Something that is not as it was sealed: the file, and what is wrong with it."""

    file: str
    message: str


@dataclass(frozen=True)
class Checked:
    """What came of checking one directory, or one file of results.

    Args:
        name: the environment, or the file.
        head: the hash that was found to stand for it; empty if there is none.
        files: how many files were compared.
        isolation: what the sealed proof of its isolation says, in a line; empty if there is none.
    """

    name: str
    head: str = ""
    files: int = 0
    isolation: str = ""
    problems: tuple[Problem, ...] = field(default=())


def check_directory(
    name: str,
    directory: Path,
    head: str | None = None,
    said: Mapping[str, Any] | None = None,
    source: str = "the results",
    *,
    whole: bool = True,
    covers: str = "",
) -> Checked:
    """Compares a directory with its manifest.

    Args:
        head: the hash that the manifest must have; None for any.
        said: what is said of it elsewhere, and must agree with the facts.
        source: where.
        whole: whether files that the manifest does not name are problems.
        covers: a file that it must name.
    """
    said = said or {}
    try:
        manifest = load(directory)
        if "environment" in said and not _agree(said["environment"], manifest.facts.get("environment")):
            # Not read any further: thousands of names may lead to one directory.
            found = [Problem(source, message) for message in _differences(said, manifest)]
            return Checked(name, manifest.head, problems=tuple(found))
        found = [Problem(file, message) for file, message in problems(directory, manifest)]
        if head not in (None, manifest.head):
            found.append(Problem(MANIFEST, "it is not the one whose hash was published"))
        if covers and all(entry.name != covers for entry in manifest.entries):
            found.append(Problem(covers, "it is not among the files that are sealed here"))
        proof, wrong = _isolation(directory, manifest)
        found += [Problem(isolation.PROOF, message) for message in wrong]
        if whole:
            found += [Problem(shown(file), "it was added later") for file in added(directory, manifest)]
    except FileNotFoundError:
        return Checked(name, problems=(Problem(MANIFEST, "there is none: nothing was sealed, or it was removed"),))
    except (OSError, ValueError) as error:
        return Checked(name, problems=(Problem(MANIFEST, f"it cannot be read: {_words(error)}"),))
    found = [*(Problem(source, message) for message in _differences(said, manifest)), *found]
    if left_out := len(found[MAXIMUM_PROBLEMS:]):
        found[MAXIMUM_PROBLEMS:] = [Problem(MANIFEST, f"{left_out} further problems are not shown")]
    return Checked(name, manifest.head, len(manifest.entries), proof, tuple(found))


def _isolation(directory: Path, manifest: Manifest) -> tuple[str, list[str]]:
    """Reads the proof of isolation that a manifest names. A seal says nothing of what a file means: this looks.

    Returns:
        what it says in a line, and what is wrong with it.
    """
    sealed = manifest.facts.get("isolation")
    if all(entry.name != isolation.PROOF for entry in manifest.entries):
        return "", ["it is not among the files, and the sealed facts say what it said"] if sealed else []
    try:
        proof = isolation.load(directory)
    except FileNotFoundError:  # which is a problem already
        return "", []
    except (OSError, ValueError) as error:
        return "", [f"it is no proof of isolation: {_words(error)}"]
    wrong = []
    if not _agree(proof.environment, manifest.facts.get("environment")):
        wrong.append(f"it is of the environment {shown(proof.environment)}, and not of the one whose logs these are")
    if proof.facts() != sealed:
        wrong.append("it does not say what the sealed facts say of it")
    return proof.line(), wrong


def _words(error: Exception) -> str:
    """Returns what an error says as one short line."""
    said = "; ".join(lines_of(error)[:1]) if isinstance(error, ValidationError) else str(error)
    return beginning(printable(" ".join(said.split())), SHOWN_CHARACTERS)


def _differences(said: Mapping[str, Any], manifest: Manifest) -> list[str]:
    facts = manifest.facts
    # The end of an agent is recorded as far as possible, by either.
    ends = said.get("agent_exit_code"), facts.get("agent_exit_code")
    agreed = AGREED if None in ends else (*AGREED, "agent_exit_code")
    return [
        f"{key} is {shown(_plain(said[key]))}, and was sealed as {shown(_plain(facts.get(key)))}"
        for key in said
        if key in agreed and not _agree(said[key], facts.get(key))
    ]


def _agree(said: Any, fact: Any) -> bool:
    """Whether two values are the same; to Python, true is 1."""
    return isinstance(said, bool) == isinstance(fact, bool) and bool(_plain(said) == _plain(fact))


def _plain(value: Any) -> Any:
    """Returns a value as every JSON can hold it: a score that is not a number is none."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_results(path: Path, find: Callable[[str], Sequence[Path]]) -> list[Checked]:
    """Compares results with the sealed logs of their environments, and with their own seal if they have one.

    Args:
        path: a batch's results.jsonl, or what `run --json` printed.
        find: names the directories in which an environment's logs may be; the first that has a manifest is taken.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds no results.
    """
    checked: list[Checked] = []
    seen: set[str] = set()
    if (path.parent / MANIFEST).is_file():
        checked.append(check_directory(path.name, path.parent, whole=False, covers=path.name))
    for row in _rows(path):
        if not _was_launched(row, find):
            continue
        if (each := _check_row(row, find, seen)).name != "?":
            seen.add(each.name)
        checked.append(each)
    return checked


def _was_launched(row: dict[str, Any], find: Callable[[str], Sequence[Path]]) -> bool:
    """Whether a row has a result or logs, or its logs a score: a run that never got a machine has none of them."""
    has_either = bool(row.get("recording")) or row.get("score") is not None
    if has_either or any(row.get("outcome") == ran for ran in RAN):
        return True
    name = row.get("environment")
    if isinstance(name, str) and _NAME.fullmatch(name) and (directory := _sealed_logs(name, find)):
        with contextlib.suppress(OSError, ValueError):
            return load(directory).facts.get("score") is not None
    return False


def _sealed_logs(name: str, find: Callable[[str], Sequence[Path]]) -> Path | None:
    return next((directory for directory in find(name) if (directory / MANIFEST).is_file()), None)


def _check_row(row: dict[str, Any], find: Callable[[str], Sequence[Path]], seen: set[str]) -> Checked:
    """Compares a row with the sealed logs of its environment.

    Args:
        seen: the environments of earlier rows: one run does not count as several.
    """
    name, head = row.get("environment"), row.get("recording")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        return Checked("?", problems=(Problem("the results", f"{shown(name)} is no name of an environment"),))
    if name in seen:
        return Checked(name, problems=(Problem("the results", "an earlier row has the same environment"),))
    if not isinstance(head, str) or not _HASH.fullmatch(head):
        return Checked(name, problems=(Problem("the results", "they carry no hash of its recording"),))
    if directory := _sealed_logs(name, find):
        return check_directory(name, directory, head, row)
    return Checked(name, problems=(Problem(MANIFEST, "its sealed logs are not here"),))


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yields what the rows of a file of results say, one at a time: each may take much memory."""
    with _opened(path) as file:
        if os.fstat(file.fileno()).st_size <= ROW_BYTES:
            try:
                only = _row(file.read(ROW_BYTES))
            except ValueError:  # it has many rows, or none
                file.seek(0)
            else:
                yield only
                return
        rows = 0
        while line := file.readline(ROW_BYTES + 1):
            if line.strip():
                rows += 1
                if rows > ROWS:
                    raise ValueError(f"it has more than {ROWS} rows")
                yield _row(line)
    if not rows:
        raise ValueError("it holds no results")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is no regular file")
        if status.st_size > RESULTS_BYTES:
            raise ValueError(f"it has more than {RESULTS_BYTES} bytes")
        yield file


def _row(text: bytes) -> dict[str, Any]:
    value = strict_json.parse(text, limit_bytes=ROW_BYTES, constants=True)
    if not isinstance(value, dict) or "environment" not in value:
        raise ValueError("it holds no results")
    return {key: value[key] for key in ("recording", "outcome", "agent_exit_code", *AGREED) if key in value}
