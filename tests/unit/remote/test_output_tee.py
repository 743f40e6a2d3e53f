"""Tests a command's output on its way to the listener and the log: redacted, decoded, bounded."""

from __future__ import annotations

from pathlib import Path

import pytest

from provisioner.redaction import Redactor
from provisioner.remote.output_tee import OutputTee

REDACTOR = Redactor({"TOKEN": "s3cret-value"})


def pieces(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


def passed_on(*chunks: bytes) -> list[str]:
    heard: list[str] = []
    with OutputTee(REDACTOR, heard.append) as tee:
        take = tee.stream()
        for chunk in chunks:
            take(chunk)
    return heard


def test_the_listener_gets_each_piece_as_it_arrives() -> None:
    heard: list[str] = []
    with OutputTee(REDACTOR, heard.append) as tee:
        take = tee.stream()
        take(b"one\n")
        assert heard == ["one\n"]
        take(b"two\n")
        assert heard == ["one\n", "two\n"]


@pytest.mark.parametrize("size", [1, 2, 5, 11, 100], ids="in-pieces-of-{}".format)
def test_a_secret_is_removed_however_it_is_split(size: int) -> None:
    assert "".join(passed_on(*pieces(b"a s3cret-value!", size))) == "a [redacted:TOKEN]!"


@pytest.mark.parametrize("size", [1, 2, 3], ids="in-pieces-of-{}".format)
def test_a_character_is_decoded_however_it_is_split(size: int) -> None:
    assert "".join(passed_on(*pieces("naïve 🦉 café".encode(), size))) == "naïve 🦉 café"


def test_bytes_that_are_not_utf_8_are_replaced() -> None:
    assert passed_on(b"a\xff\xfeb") == ["a\ufffd\ufffdb"]


def test_text_that_was_held_back_is_passed_on_at_the_end() -> None:
    assert passed_on(b"x s3cret") == ["x ", "s3cret"]


def test_an_incomplete_character_is_replaced_at_the_end() -> None:
    assert passed_on("é".encode()[:1]) == ["\ufffd"]


def test_empty_output_is_not_passed_on() -> None:
    assert passed_on(b"", b"") == []


def test_streams_do_not_mix() -> None:
    heard: list[str] = []
    with OutputTee(REDACTOR, heard.append) as tee:
        stdout, stderr = tee.stream(), tee.stream()
        stdout("é".encode()[:1])
        stdout(b"")
        stderr(b"s3cret")
        stdout("é".encode()[1:])
        stderr(b"-value")
    assert heard == ["é", "[redacted:TOKEN]"]


def test_the_log_gets_the_same_text_as_the_listener(tmp_path: Path) -> None:
    log, heard = tmp_path / "start.log", list[str]()
    with OutputTee(REDACTOR, heard.append, log) as tee:
        tee.stream()("é s3cret-value".encode())
        assert log.read_text() == "é [redacted:TOKEN]", "the log is written before the command ends"
    assert log.read_text() == "".join(heard)


def test_a_second_command_appends_to_the_log(tmp_path: Path) -> None:
    log = tmp_path / "agent.log"
    for number in (1, 2):
        with OutputTee(REDACTOR, lambda _: None, log, heading=f"$ run {number} s3cret-value") as tee:
            tee.stream()(b"out\n")
    assert log.read_text() == "$ run 1 [redacted:TOKEN]\nout\n\n$ run 2 [redacted:TOKEN]\nout\n\n"


@pytest.mark.parametrize(
    ("limit_bytes", "kept"),
    [(0, ""), (2, "a"), (3, "aé"), (4, "aé."), (100, "aé..!!!")],
    ids=["none", "amid-a-character", "after-a-character", "later", "all"],
)
def test_the_log_is_bounded_and_the_listener_still_gets_everything(tmp_path: Path, limit_bytes: int, kept: str) -> None:
    log, heard = tmp_path / "agent.log", list[str]()
    with OutputTee(REDACTOR, heard.append, log, limit_bytes) as tee:
        stdout, stderr = tee.stream(), tee.stream()
        stdout("aé".encode())
        stderr(b"..")
        stdout(b"!!!")
    assert "".join(heard) == "aé..!!!"
    assert log.read_text() == kept


def test_text_that_was_held_back_is_passed_on_after_a_failure_too(tmp_path: Path) -> None:
    log, heard = tmp_path / "start.log", list[str]()

    def time_out(tee: OutputTee) -> None:
        tee.stream()(b"s3cret")
        raise TimeoutError

    with pytest.raises(TimeoutError), OutputTee(REDACTOR, heard.append, log) as tee:
        time_out(tee)
    assert heard == ["s3cret"]
    assert log.read_text() == "s3cret"


def test_the_log_is_closed_when_the_listener_fails(tmp_path: Path) -> None:
    def fail(text: str) -> None:
        raise BrokenPipeError

    log = tmp_path / "start.log"
    with pytest.raises(BrokenPipeError), OutputTee(REDACTOR, fail, log) as tee:
        tee.stream()(b"s3cret")
    assert log.read_text() == "s3cret"
