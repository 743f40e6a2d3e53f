"""Tables of what was recorded, row by row."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from provisioner.recording import tables
from provisioner.recording.calls import CALLS
from tests.unit.recording.proofs import proof


def test_a_call_and_a_connection_are_a_line_each(tmp_path: Path) -> None:
    call = {
        "at": "T1",
        "machine": "aux",
        "user": "root",
        "operation": "score",
        "argv": ["cat", "/flag"],
        "seconds": 0.1,
    }
    rows = [call | {"exit_code": 1}, call | {"error": "the machine ended"}, {"at": "T2", "card": "link", "port": 80}]
    path = tmp_path / CALLS
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert [tables.in_words(row) for row in tables.rows_of(path)] == [
        "T1  root@aux  exit 1  0.1 s  score cat /flag", "T1  root@aux  the machine ended  0.1 s  score cat /flag",
        "T2  card link  port 80",
    ]  # fmt: skip


def test_what_begins_in_the_proof_of_isolation_is_told_apart() -> None:
    known = proof()
    seconds = [(known.ended_at - known.began_at).total_seconds() / 2, -1, 60]
    rows: list[dict[str, Any]] = [
        {"at": (known.began_at + timedelta(seconds=after)).isoformat(), "port": 443} for after in seconds
    ]
    told = [
        tables.IN_PROOF in tables.in_words(row, known) for row in (*rows, {"at": "T1"}, {"at": "2026-01-02T03:00:01"})
    ]
    assert told == [True, False, False, False, False]
    assert tables.IN_PROOF not in tables.in_words(rows[0])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{", "not JSON"), (b"[1]", "no object"), (b'{"a":' + b"[" * 5000, "nested"), (b'{"a": 1, "a": 2}', "twice"),
        (b"{}" + b" " * (2 << 20), "bytes"),
    ],
    ids=["cut", "list", "deep", "key twice", "long"],
)  # fmt: skip
def test_what_was_never_recorded_is_no_row(line: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        tables.row_of(line)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text('{"at": "T"}\n')
    (tmp_path / CALLS).symlink_to("secret")
    with pytest.raises(OSError, match="symbolic link"):
        next(tables.rows_of(tmp_path / CALLS))
