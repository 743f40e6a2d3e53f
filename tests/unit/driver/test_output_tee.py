"""Tests a command's output on its way to the listener and the log: redacted, decoded, bounded."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from provisioner.base.redaction import Redactor
from provisioner.driver.output_tee import OutputTee
from provisioner.recording.manifest import added, load, problems, seal
from provisioner.store.files import write_atomically

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


@pytest.mark.parametrize(
    ("chunks", "heard"),
    [
        ([b"a\xff\xfeb"], ["a\ufffd\ufffdb"]),
        ([b"x s3cret"], ["x ", "s3cret"]),
        (["é".encode()[:1]], ["\ufffd"]),
        ([b""], []),
    ],
    ids=["not-utf-8", "held-back", "incomplete", "empty"],
)
def test_all_text_is_passed_on_and_nothing_else(chunks: list[bytes], heard: list[str]) -> None:
    assert passed_on(*chunks) == heard


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


def test_a_long_log_loses_its_middle_and_the_listener_nothing(tmp_path: Path) -> None:
    log, heard = tmp_path / "agent.log", list[str]()
    with OutputTee(REDACTOR, heard.append, log, limit_bytes=400) as tee:
        stdout, stderr = tee.stream(), tee.stream()
        for number in range(100):
            stdout(b"out %02d\n" % number)
            stderr(b"err %02d\n" % number)
            assert log.stat().st_size <= 400
    assert len("".join(heard).splitlines()) == 200
    beginning, mark, end = log.read_text().partition("\n[... cut out: the log was too long ...]\n")
    assert beginning.startswith("out 00\nerr 00\n")
    assert mark
    assert len(beginning) >= 100
    assert end.endswith("out 99\nerr 99\n")
    assert len(end) >= 100


def test_a_log_is_bounded_over_all_commands_that_write_to_it(tmp_path: Path) -> None:
    log = tmp_path / "agent.log"
    for number in range(100):
        with OutputTee(REDACTOR, lambda _: None, log, limit_bytes=400) as tee:
            tee.stream()(b"run %02d\n" % number)
    assert log.stat().st_size <= 400
    assert log.read_text().startswith("run 00\n")
    assert log.read_text().endswith("run 98\nrun 99\n")


def test_two_writers_of_one_log_lose_nothing(tmp_path: Path) -> None:
    log = tmp_path / "agent.log"

    def write(name: bytes) -> None:
        with OutputTee(REDACTOR, lambda _: None, log, limit_bytes=8000) as tee:
            take = tee.stream()
            for number in range(3000):
                take(b"%s %04d\n" % (name, number))

    threads = [threading.Thread(target=write, args=[name]) for name in (b"one", b"two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    end = log.read_text().partition("too long ...]\n")[2].splitlines()[1:]
    for name in ("one", "two"):
        kept = [int(line.removeprefix(name)) for line in end if line.startswith(name)]
        assert kept == list(range(3000))[3000 - len(kept) :]


@pytest.mark.parametrize("is_removed", [False, True], ids=["sealed", "removed"])
def test_output_that_comes_once_the_log_is_sealed_is_only_heard(tmp_path: Path, is_removed: bool) -> None:
    logs, heard = tmp_path / "logs", list[str]()
    logs.mkdir()
    with OutputTee(REDACTOR, heard.append, logs / "agent.log", heading="$ true") as tee:
        take = tee.stream()
        take(b"one\n")
        seal(logs, {}, write_atomically)
        if is_removed:
            logs.rename(tmp_path / "archived")
        take(b"two\n")
    assert heard == ["one\n", "two\n"]
    directory = tmp_path / "archived" if is_removed else logs
    assert (directory / "agent.log").read_text() == "$ true\none\n"
    with OutputTee(REDACTOR, heard.append, directory / "score.log", heading="$ true"):
        pass
    assert (problems(directory, load(directory)), added(directory, load(directory))) == ([], [])


def test_text_that_was_held_back_comes_after_a_failure_too(tmp_path: Path) -> None:
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
