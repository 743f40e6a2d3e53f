"""Tests recordings of terminals: what they hold, how they end, and how they are read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from provisioner.base.redaction import Redactor
from provisioner.driver.output_tee import OutputTee
from provisioner.recording.casts import Cast, DamagedCastError, Event, events_of, header_of
from provisioner.recording.manifest import seal
from provisioner.store.files import write_atomically

REDACTOR = Redactor({"TOKEN": "s3cret-value"})


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def shown(path: Path) -> str:
    return "".join(event.text for event in events_of(path) if event.kind == "o")


def test_a_recording_is_an_asciicast_without_secrets(tmp_path: Path) -> None:
    with Cast(tmp_path, "terminal", REDACTOR, "login s3cret-value", columns=100, rows=30) as cast:
        for piece in (
            b"\x1b[31mred ",
            "\N{EURO SIGN}".encode()[:1],
            "\N{EURO SIGN}".encode()[1:],
            b" s3cret-",
            b"value",
        ):
            cast.show(piece)
        cast.resize(100, 30)
        cast.resize(120, 40)
    header, *events = lines(tmp_path / "terminal-1.cast")
    assert (header["version"], header["width"], header["height"]) == (2, 100, 30)
    assert (header["title"], header["command"]) == ("terminal", "login [redacted:TOKEN]")
    assert "".join(text for _, kind, text in events if kind == "o") == "\x1b[31mred \N{EURO SIGN} [redacted:TOKEN]"
    assert [text for _, kind, text in events if kind == "r"] == ["120x40"]
    assert b"\x1b" not in (tmp_path / "terminal-1.cast").read_bytes()
    assert header_of(tmp_path / "terminal-1.cast").command == "login [redacted:TOKEN]"


def test_output_without_a_terminal_gets_line_ends(tmp_path: Path) -> None:
    with Cast(tmp_path, "agent", REDACTOR) as cast, OutputTee(REDACTOR, lambda _: None, cast=cast) as tee:
        out, err = tee.stream(), tee.stream()
        out(b"one\ntwo s3cr")
        err(b"three\r\n")
        out(b"et-value\n")
    assert shown(tmp_path / "agent-1.cast") == "one\r\ntwo three\r\n[redacted:TOKEN]\r\n"


def test_each_recording_has_a_file_of_its_own(tmp_path: Path) -> None:
    for _ in range(3):
        Cast(tmp_path, "agent", REDACTOR).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["agent-1.cast", "agent-2.cast", "agent-3.cast"]


def test_a_recording_says_where_it_was_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("provisioner.recording.casts.LIMIT_BYTES", 10_000)
    with Cast(tmp_path, "agent", REDACTOR) as cast:
        for _ in range(1000):
            cast.show(b"\x00" * 100)
    path = tmp_path / "agent-1.cast"
    assert path.stat().st_size <= 10_000
    assert list(events_of(path))[-1].kind == "m"


def test_what_does_not_fit_on_the_disk_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really = os.write
    with Cast(tmp_path, "agent", REDACTOR) as cast:
        cast.show(b"before ")
        monkeypatch.setattr(os, "write", lambda descriptor, data: really(descriptor, data[:5]))
        cast.show(b"lost")
        cast.show(b"lost")
        monkeypatch.undo()
        cast.show(b"after")
        monkeypatch.setattr(os, "write", lambda descriptor, data: really(descriptor, data[:5]))
        cast.show(b"lost")
        monkeypatch.undo()
    texts = [event.text for event in events_of(tmp_path / "agent-1.cast")]
    lost = "pieces were lost: no room on the disk"
    assert texts == ["before ", f"2 {lost}", "after", f"1 {lost}"]


def test_a_recording_that_begins_on_a_full_disk_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: really(descriptor, data[:5]))
    with Cast(tmp_path, "agent", REDACTOR, "bash solve.sh") as cast:
        cast.show(b"lost")
        monkeypatch.undo()
        cast.show(b"after")
    path = tmp_path / "agent-1.cast"
    assert header_of(path).command == "bash solve.sh"
    assert [event.text for event in events_of(path)] == ["1 pieces were lost: no room on the disk", "after"]


def test_a_directory_that_is_gone_or_sealed_stops_nothing(tmp_path: Path) -> None:
    with Cast(tmp_path / "gone", "agent", REDACTOR) as cast:
        cast.show(b"nothing")
    with Cast(tmp_path, "agent", REDACTOR) as cast:
        cast.show(b"before")
        seal(tmp_path, {}, write_atomically)
        cast.show(b"after")
    assert shown(tmp_path / "agent-1.cast") == "before"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "does not begin"),
        ('{"version": 3}\n', "does not begin"),
        ("[1]\n", "does not begin"),
        ('{"version": 2}\n[1, "o"]\n', "line 2 is no event"),
        ('{"version": 2}\n[1, "o", "x"]\n{"a": 1}\n', "line 3 is no event"),
        ('{"version": 2}\n[NaN, "o", "x"]\n', "line 2 cannot be read"),
        ('{"version": 2}\n[1, "o", "\\ud800"]\n', "line 2 cannot be read"),
    ],
    ids=["empty", "version", "list", "short", "object", "nan", "surrogate"],
)
def test_a_damaged_recording_is_named_by_its_line(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "agent-1.cast"
    path.write_text(text)
    with pytest.raises(DamagedCastError, match=problem):
        (header_of(path), list(events_of(path)))


def test_time_never_goes_back(tmp_path: Path) -> None:
    path = tmp_path / "agent-1.cast"
    path.write_text('{"version": 2}\n[5, "o", "a"]\n[1, "o", "b"]\n')
    assert list(events_of(path)) == [Event(5.0, "o", "a"), Event(5.0, "o", "b")]


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "real").write_text('{"version": 2}\n')
    (tmp_path / "agent-1.cast").symlink_to("real")
    with pytest.raises(OSError, match="symbolic links"):
        header_of(tmp_path / "agent-1.cast")
