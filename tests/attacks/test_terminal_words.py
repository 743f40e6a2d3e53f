"""A machine, a family or a cloud says words that would steer the operator's terminal, or mislead the operator's eye.

No escape sequence (titles, the clipboard by OSC 52, moved cursors), no control character, no bidirectional or invisible
character and no markup of ours reaches a terminal, however it is cut into pieces. Output is bounded.
"""

from __future__ import annotations

import io
import json
import os
import select
import tty
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from provisioner.base.errors import TaskError
from provisioner.batch.live_status import LiveStatus
from provisioner.batch.records import Batch
from provisioner.batch.rows import failed_row
from provisioner.batch.suite import Run, Suite
from provisioner.cli.commands import exec as machines
from provisioner.cli.commands.batch.view import BatchView
from provisioner.cli.output import Result, render, table
from provisioner.cli.terminal import TerminalProgress, render_error
from provisioner.ssh.connection import Connection
from provisioner.ssh.exec_frames import EXIT, frame
from tests.unit.fakes.exec_call import Call
from tests.unit.fakes.sshd import Sshd
from tests.unit.fakes.world import environment
from tests.unit.ssh.test_connection import login_to

WORDS = {
    "title": "\x1b]0;owned\x07",
    "title-st": "\x1b]2;owned\x1b\\",
    "clipboard": "\x1b]52;c;cm0gLXJmIH4K\x07",
    "link": "\x1b]8;;http://evil\x1b\\click\x1b]8;;\x1b\\",
    "clear": "\x1b[2J\x1b[H",
    "report": "\x1b[6n\x1b[c\x05",
    "c1": "\x9b2J\x9d0;owned\x9c",
    "device": "\x1bP+q544e\x1b\\\x1b_Gi=1;AAAA\x1b\\",
    "charset": "\x0e\x1b(0\x0f",
    "overwrite": "harmless\rfailed\b\b\b\b",
    "bidi": "\u202egnp.exe\u202c \u2066x\u2069 \u200e\u200f\u061c",
    "invisible": "\u200b\u200c\u200d\u2060\ufeff\u00ad",
    "lines": "one\u2028two\u2029three\x0bfour\x0cfive\x85six",
    "tags": "\U000e0041\U000e007f",
    "markup": "[bold]b[/bold] [link=http://evil]c[/link] [/] [red]",
    "slash": "[red]\\",
    "zero": "\0\x7f",
}
# What one line may never have. ESC is allowed only where the test's console colours its own words.
FORBIDDEN = {chr(c) for c in (*range(0x20), *range(0x7F, 0xA0)) if chr(c) not in "\n\x1b"} | set(
    "\u061c\u00ad\u200b\u200c\u200d\u200e\u200f\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2060\u2066\u2067\u2068\u2069\ufeff"
    "\U000e0041\U000e007f"
)
hostile = pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)


def assert_harmless(said: str, words: str) -> None:
    assert not FORBIDDEN & set(said)
    assert "\x1b" not in said
    for markup in ("[bold]", "[link=http://evil]", "[red]", "[/]"):
        if markup in words:
            assert markup in said


def console() -> Console:
    return Console(file=io.StringIO(), highlight=False, soft_wrap=True, color_system=None)


def said_by(shown: Console) -> str:
    assert isinstance(shown.file, io.StringIO)
    return shown.file.getvalue()


@hostile
def test_notes_phases_and_output(words: str) -> None:
    shown = console()
    progress = TerminalProgress(shown)
    progress.note(f"warning: {words} end")
    progress.phase_started("start")
    progress.output(f"{words} end\n")
    progress.phase_finished(words, 1.0)
    assert_harmless(said_by(shown), words)
    # A note is one line, whatever it contains.
    assert said_by(shown).count("\n") == 4


@hostile
def test_the_spinner_of_a_terminal(words: str) -> None:
    shown = Console(file=io.StringIO(), force_terminal=True, highlight=False, soft_wrap=True, color_system=None)
    progress = TerminalProgress(shown)
    progress.phase_started("images")
    progress.output(f"{words} end\nmore\n")
    progress.phase_started(words)
    progress.stop()
    said = said_by(shown)
    assert "owned" not in said.partition("\x1b]")[2]
    assert not {"\x1b]", "\x1bP", "\x1b_", "\x9b", "\x9d", "\x07", "\u202e", "\u2066"} & set(said.split("\x1b["))
    assert "\x1b[2J" not in said
    assert "\x1b[6n" not in said


@hostile
def test_errors_and_hints(capsys: pytest.CaptureFixture[str], words: str) -> None:
    render_error(TaskError(words, hint=words, details=f"{words}\n{words}"), as_json=False)
    assert_harmless(capsys.readouterr().err, words)


@hostile
def test_tables_and_results_even_through_a_pipe(words: str) -> None:
    out = io.StringIO()  # `provisioner logs ENV | head` ends on a terminal too
    render(Result({}, f"{words}\n{table(['TASK'], [[words]])}"), as_json=False, out=out)
    assert_harmless(out.getvalue(), words)
    assert len(table(["TASK"], [[f"{words}."]]).splitlines()) == 2


@hostile
def test_the_view_of_a_batch(words: str) -> None:
    shown = Console(file=io.StringIO(), highlight=False, soft_wrap=True, color_system=None, width=500)
    run = Run(key=f"fam/{words}/one/1", family="/fam", task=words, agent="one", repetition=1)
    suite = {"name": "s", "families": [{"path": "fam"}], "submissions": [{"name": "one", "text": ""}]}
    batch = Batch(
        id="s-1", suite=Suite.model_validate(suite), suite_file="/s.yaml", shared=False,
        created_at=datetime(2026, 1, 2, tzinfo=UTC), version="1", runs=(run,),
    )  # fmt: skip
    view = BatchView(shown, batch)
    live_status = LiveStatus()
    with live_status.track(f"s-1/{run.key}") as active_run:
        active_run.attempt, active_run.phase, active_run.output = 1, words, words
        active_runs = live_status.active_runs()
        view.show({}, [failed_row(run, words)], active_runs, [(f"s-1/{run.key}", words)], (0, 0))
        shown.print(view._table({}, [failed_row(run, words)], active_runs, (0, 0)))
    assert_harmless(said_by(shown), words)


@hostile
@pytest.mark.parametrize("piece_bytes", [1, 2, 3, 1000])
def test_exec_on_a_terminal_in_pieces(words: str, piece_bytes: int) -> None:
    data = f"before\n{words}\tafter\r\n".encode()
    said = shown_by_exec(data, piece_bytes, terminal=True)
    assert_harmless(said.replace("\t", " "), words)
    assert said.startswith("before\n")
    assert said.endswith("\tafter\n")


def test_exec_into_a_pipe_is_unchanged() -> None:
    data = b"\x1b]52;c;AAAA\x07\xff\0\r\n"
    assert shown_by_exec(data, 3, terminal=False).encode("utf-8", "surrogateescape") == data


def shown_by_exec(data: bytes, piece_bytes: int, *, terminal: bool) -> str:
    reader, writer = os.openpty() if terminal else os.pipe()
    if terminal:
        tty.setraw(writer)
    try:
        listener = machines._Output(writer)
        for start in range(0, len(data), piece_bytes):
            listener(data[start : start + piece_bytes])
        listener.end()
        said = b""
        while select.select([reader], [], [], 0.2)[0]:
            said += os.read(reader, 65536)
        return said.decode("utf-8", "surrogateescape")
    finally:
        os.close(reader)
        os.close(writer)


@hostile
def test_exec_of_a_command_that_never_started(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def program(call: Call) -> None:
        call.say(stderr=f"{words} end\n".encode())
        call.channel.sendall(frame(EXIT, json.dumps({"errno": 2, "what": "program", "text": f"no {words}"}).encode()))

    reader, writer = os.openpty()
    tty.setraw(writer)
    kept = os.dup(2)
    with Sshd(program) as server:
        session = SimpleNamespace()
        monkeypatch.setattr(machines, "environment_session", lambda _: (session, environment()))
        monkeypatch.setattr(machines, "connect_kept", lambda *_: Connection(login_to(server, tmp_path)))
        os.dup2(writer, 2)
        try:
            done = machines.main("env", ["true"])
        finally:
            os.dup2(kept, 2)
    said = b""
    while select.select([reader], [], [], 0.2)[0]:
        said += os.read(reader, 65536)
    for descriptor in (reader, writer, kept):
        os.close(descriptor)
    assert_harmless(said.decode(), words)
    assert said.decode().count(" end\n") == 1
    assert said.splitlines()[-1].startswith(b"no ")
    assert done.exit_code == 127


def test_an_endless_line_is_not_collected() -> None:
    shown = console()
    progress = TerminalProgress(shown)
    progress.phase_started("start")
    for _ in range(100):
        progress.output("x" * 10_000)
    assert len(progress._half_line) <= 10_000
    assert len(said_by(shown)) >= 900_000


@pytest.mark.parametrize("trace", [True, False], ids=["traceback", "log"])
def test_tracebacks_and_logs_of_debug(
    capsys: pytest.CaptureFixture[str], trace: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import logging

    from provisioner.cli import command

    monkeypatch.setattr(logging, "root", logging.RootLogger(logging.WARNING))
    monkeypatch.setattr(command._interrupts, "install", lambda: None)
    everything = "".join(WORDS.values())

    def work() -> Result:
        if trace:
            raise ValueError(everything)
        logging.root.warning(everything)
        return Result({})

    command._run(work, as_json=False, debug=True)
    said = capsys.readouterr().err
    assert "harmless" in said
    assert not FORBIDDEN & set(said)
    assert "\x1b" not in said


SAFE_JSON: dict[str, Callable[[str], object]] = {
    "surrogate": lambda _: "\ud800x\udfff",
    "key": lambda _: {"\udc80": 1},
    "words": lambda words: words,
}


@pytest.mark.parametrize("value", SAFE_JSON.values(), ids=SAFE_JSON)
def test_json_is_ascii_and_free_of_surrogates(value: Callable[[str], object]) -> None:
    out = io.StringIO()
    render(Result({"value": value("".join(WORDS.values()))}), as_json=True, out=out)
    assert out.getvalue().isascii()
    assert not FORBIDDEN & set(out.getvalue())
    json.dumps(json.loads(out.getvalue()), ensure_ascii=False).encode()  # would refuse surrogates


def test_json_of_great_depth_or_length_is_cut() -> None:
    out = io.StringIO()
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    render(Result({"deep": deep, "long": "x" * (17 << 20)}), as_json=True, out=out)
    answer = json.loads(out.getvalue())
    assert len(answer["long"]) <= 16 << 20
    assert answer["long"].endswith(" [...]")
    assert isinstance(answer["deep"], list)
