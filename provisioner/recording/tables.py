"""Reads the recorded tables: calls of machines, and what the captures of their cards say. All of it is untrusted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from provisioner import strict_json
from provisioner.recording.isolation import Proof

NETWORKS = "network-*.jsonl"
# The mark of a row that begins while provisioner proves the isolation, and so most likely with one of its probes.
IN_PROOF = "(began in the isolation proof)"
LINE_BYTES = 1 << 20
LINE_VALUES = 1000


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yields a table's rows.

    Raises:
        OSError: it cannot be read.
        ValueError: a row is no JSON object, or larger than any that is recorded.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        while line := file.readline(LINE_BYTES):
            yield row_of(line)


def row_of(line: bytes) -> dict[str, Any]:
    """Reads a row from its line.

    Raises:
        ValueError: it is no JSON object, or larger than any that is recorded.
    """
    row = strict_json.parse(line, limit_bytes=LINE_BYTES, maximum_values=LINE_VALUES)
    if not isinstance(row, dict):
        raise ValueError("a row is no object")
    return row


def in_words(row: dict[str, Any], proof: Proof | None = None) -> str:
    """Describes a call, or what a capture says, in one line; not yet printable.

    Args:
        proof: of the environment's isolation. A row of a capture that begins in it gets a mark. Later packets to the
            same target may be counted in the same row.
    """
    at, argv = str(row.get("at", "")), row.get("argv")
    if isinstance(argv, list):
        ended = row.get("error") or f"exit {row.get('exit_code')}"
        who = f"{row.get('user')}@{row.get('machine')}"
        what = " ".join(str(word) for word in (row.get("operation"), row.get("part"), *argv) if word)
        return f"{at}  {who}  {ended}  {row.get('seconds')} s  {what}"
    mark = f"{IN_PROOF}  " if proof and _is_within(at, proof) else ""
    return f"{at}  {mark}" + "  ".join(f"{name} {value}" for name, value in row.items() if name != "at")


def _is_within(at: str, proof: Proof) -> bool:
    try:
        return proof.began_at <= datetime.fromisoformat(at) <= proof.ended_at
    except (ValueError, TypeError):  # no time, or one without a zone
        return False
