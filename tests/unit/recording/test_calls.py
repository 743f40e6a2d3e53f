"""Tests the record of calls: what it holds, what it never holds, and that it stops nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from provisioner.base.redaction import Redactor
from provisioner.recording.calls import CALLS, Call, CallLog, in_words, row_of, rows_of
from provisioner.recording.manifest import seal
from provisioner.ssh.connection import Connection
from provisioner.store.files import write_atomically
from tests.unit.fakes.sshd import Sshd
from tests.unit.ssh.test_connection import login_to


def recorded(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / CALLS).read_text().splitlines()]


def test_each_call_is_a_line_without_secrets_or_input(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    calls = CallLog(logs, "primary", Redactor({"TOKEN": "s3cret-value"}))
    with Sshd() as server, Connection(login_to(server, tmp_path), calls=calls) as connection:
        connection.run(["sh", "-c", "cat; exit 3", "s3cret-value"], stdin=b"s3cret-value", part="score")
        connection.write_file(str(tmp_path / "written"), b"s3cret-value")
        connection.read_file(str(tmp_path / "written"), 100)
        with pytest.raises(FileNotFoundError):
            connection.read_file(str(tmp_path / "missing"), 100)
    run, written, read, missing = recorded(logs)
    assert (run["machine"], run["part"], run["operation"], run["user"]) == ("primary", "score", "execute", "root")
    assert (run["argv"], run["exit_code"]) == (["sh", "-c", "cat; exit 3", "[redacted:TOKEN]"], 3)
    assert run["bytes"] == {"stdin": 12, "stdout": 12, "stderr": 0}
    assert run["at"].endswith("+00:00")
    assert 0 <= run["seconds"] < 60
    assert [(each["operation"], each["argv"]) for each in (written, read)] == [
        ("write", [str(tmp_path / "written")]),
        ("read", [str(tmp_path / "written")]),
    ]
    assert (written["bytes"]["stdin"], read["bytes"]["stdout"], missing["exit_code"]) == (12, 12, 2)
    assert "s3cret" not in (logs / CALLS).read_text()


def test_a_call_that_an_error_ends_says_so(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError), CallLog(tmp_path).recorded(Call("execute", "root", ["true"])):
        raise TimeoutError
    assert (recorded(tmp_path)[0]["exit_code"], recorded(tmp_path)[0]["error"]) == (None, "TimeoutError")


def test_long_and_many_arguments_are_cut(tmp_path: Path) -> None:
    with CallLog(tmp_path).recorded(Call("execute", "root", ["x" * 100_000] * 1000)):
        pass
    [call] = recorded(tmp_path)
    assert (len(call["argv"]), call["arguments_left_out"]) == (32, 968)
    assert call["argv"][0].endswith(" [...]")
    assert (tmp_path / CALLS).stat().st_size < 40_000


def test_the_file_says_where_it_was_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("provisioner.recording.calls.LIMIT_BYTES", 1000)
    for number in range(20):
        with CallLog(tmp_path).recorded(Call("execute", "root", [str(number)])):
            pass
    *calls, last = recorded(tmp_path)
    assert [call["argv"] for call in calls] == [[str(number)] for number in range(len(calls))]
    assert last.keys() == {"at", "cut_here_at"}
    assert (tmp_path / CALLS).stat().st_size < 1200


def test_nothing_follows_on_the_line_that_says_where_it_was_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("provisioner.recording.calls.LIMIT_BYTES", 1000)
    for argv in ("first", "x" * 900, "small"):
        with CallLog(tmp_path).recorded(Call("execute", "root", [argv])):
            pass
    first, last = recorded(tmp_path)
    assert (first["argv"], set(last)) == (["first"], {"at", "cut_here_at"})


@pytest.mark.parametrize("what", ["gone", "full"])
def test_a_line_that_cannot_be_written_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    calls, logs = CallLog(tmp_path / "logs"), tmp_path / "logs"
    if what == "full":
        logs.mkdir()
        really = os.write
        monkeypatch.setattr(os, "write", lambda descriptor, data: really(descriptor, data[: len(data) // 2]))
    for _ in range(2):
        with calls.recorded(Call("execute", "root", ["lost"])):
            pass
    monkeypatch.undo()
    logs.mkdir(exist_ok=True)
    with calls.recorded(Call("execute", "root", ["kept"])):
        pass
    [call] = recorded(logs)
    assert (call["argv"], call["lost_before"]) == (["kept"], 2)


def test_nothing_is_added_once_it_is_sealed(tmp_path: Path) -> None:
    with CallLog(tmp_path).recorded(Call("execute", "root", ["before"])):
        pass
    seal(tmp_path, {}, write_atomically)
    with CallLog(tmp_path).recorded(Call("execute", "root", ["after"])):
        pass
    assert [call["argv"] for call in recorded(tmp_path)] == [["before"]]


def test_without_a_directory_nothing_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with CallLog().recorded(Call("execute", "root", ["true"])):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_call_and_the_end_of_a_full_file_are_a_line_each(tmp_path: Path) -> None:
    call = {
        "at": "T1",
        "machine": "aux",
        "user": "root",
        "operation": "score",
        "argv": ["cat", "/flag"],
        "seconds": 0.1,
    }
    rows = [call | {"exit_code": 1}, call | {"error": "the machine ended"}, {"at": "T2", "cut_here_at": "9 bytes"}]
    path = tmp_path / CALLS
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert [in_words(row) for row in rows_of(path)] == [
        "T1  root@aux  exit 1  0.1 s  score cat /flag", "T1  root@aux  the machine ended  0.1 s  score cat /flag",
        "T2  cut_here_at 9 bytes",
    ]  # fmt: skip


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
        row_of(line)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text('{"at": "T"}\n')
    (tmp_path / CALLS).symlink_to("secret")
    with pytest.raises(OSError, match="symbolic link"):
        next(rows_of(tmp_path / CALLS))
