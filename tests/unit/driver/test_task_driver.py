"""Tests the driver with a machine whose helper was replaced."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

import pytest

from provisioner.base.errors import TaskError
from provisioner.base.redaction import Redactor
from provisioner.driver.task_driver import ANSWER_OUTPUT_BYTES, STREAM_LIMIT_BYTES, TaskDriver
from provisioner.ssh.connection import Connection
from provisioner.ssh.exchange import OUTPUT_LIMIT_BYTES, BoundedBuffer, Completed, StreamSize


class HostileMachine:
    """Prints arbitrary output in place of the helper, and returns arbitrary bytes as its result."""

    def __init__(self, output: Iterator[bytes], result: bytes) -> None:
        self._output, self._result = output, result

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        program: str,
        on_stdout: Callable[[bytes], None],
        on_stderr: Callable[[bytes], None] | None = None,
        timeout_seconds: float | None = None,
        limit_bytes: int = 0,
        part: str = "",
    ) -> Completed:
        kept = BoundedBuffer(limit_bytes)
        for data in self._output:
            kept.write(data)
            on_stdout(data)
        return Completed(0, kept.value(), b"", stdout_size=kept.size)

    def read_file(self, path: str, limit_bytes: int, *, remove: bool) -> bytes:
        return self._result


def driver(
    result: bytes, output: Iterator[bytes] | None = None, logs: Path | None = None, secret: str = "s3cret-value"
) -> TaskDriver:
    machine = cast(Connection, HostileMachine(output or iter(()), result))
    return TaskDriver(machine, "fam", Redactor({"TOKEN": secret}), logs=logs)


@pytest.mark.parametrize(
    "result",
    [
        b"", b"garbage", b"\xff\xfe", b"null", b"[]", b"7", b'"ok"', b'{"status": "ok"', b"{" * 100_000,
        b"[" * 500 + b"]" * 500,
        json.dumps({"status": "ok", "value": json.loads("[" * 150 + "]" * 150)}).encode(),
        b'{"status": "ok", "value": "\\ud800"}',
        b'{"status": "fine", "value": 1}',
    ],
)  # fmt: skip
def test_an_invalid_result_is_a_task_error(result: bytes) -> None:
    with pytest.raises(TaskError, match=r"^score\(\) (gave no result that could be read|failed)"):
        driver(result).call("score", timeout_seconds=60).value("score()")


def missing(module: str, kind: str = "ModuleNotFoundError") -> bytes:
    failure = {"status": "error", "kind": "exception", "type": kind, "message": f"No module named '{module}'"}
    return json.dumps(failure).encode()


def test_a_missing_modules_error_names_a_build_step() -> None:
    with pytest.raises(TaskError, match=r"^install\(\) raised ModuleNotFoundError") as caught:
        driver(missing("numpy")).call("install", timeout_seconds=60).value("install()")
    assert '{"type": "shell", "commands": ["pip install <PACKAGE>"]}' in (caught.value.hint or "")


def test_no_build_step_is_named_for_other_failures() -> None:
    with pytest.raises(TaskError) as caught:
        driver(missing("numpy", "KeyError")).call("install", timeout_seconds=60).value("install()")
    assert caught.value.hint is None


def test_a_valid_result_is_returned_without_secrets() -> None:
    said = b'{"status": "ok", "value": {"said": ["with s3cret-value"], "a s3cret-value": {"s3cret-value": 1}}}'
    answer = driver(said).call("score", timeout_seconds=60)
    assert answer.value("score()") == {
        "said": ["with [redacted:TOKEN]"],
        "a [redacted:TOKEN]": {"[redacted:TOKEN]": 1},
    }


def test_a_secret_like_a_key_of_the_helpers_spoils_no_result() -> None:
    said = json.dumps({"status": "ok", "value": {"value": 1}}).encode()
    answer = driver(said, secret="value").call("score", timeout_seconds=60)
    assert answer.value("score()") == {"[redacted:TOKEN]": 1}


def test_a_failure_shows_the_familys_frame_and_the_exception() -> None:
    frames = [f'  File "/usr/lib/library.py", line {line}, in call\n    call()' for line in range(50)]
    trace = ["Traceback (most recent call last):", '  File "/root/fam.py", line 3, in start', "    train()", *frames]
    result = {"status": "error", "kind": "exception", "type": "KeyError", "message": "'x'"}
    text = "\n".join([*trace, "KeyError: 'x'", ""])
    answer = driver(json.dumps({**result, "traceback": text}).encode()).call("start", timeout_seconds=60)
    with pytest.raises(TaskError) as failure:
        answer.value("start()")
    lines = (failure.value.details or "").splitlines()
    assert lines[:3] == trace[:3]
    assert lines[4] == "[...]"
    assert lines[-1] == "KeyError: 'x'"
    assert len(lines) == 12


def test_an_answer_says_how_much_the_operation_wrote() -> None:
    half = OUTPUT_LIMIT_BYTES // 2
    sent = b"x" * half + b"\n[... 70000000 bytes cut out ...]\n" + b"y" * half
    pieces = (sent[begin : begin + 65_521] for begin in range(0, len(sent), 65_521))
    answer = driver(b"{}", pieces).call("intermediate_score", timeout_seconds=60)
    total = 70_000_000 + OUTPUT_LIMIT_BYTES
    assert answer.stdout_size == StreamSize(total, total - ANSWER_OUTPUT_BYTES)


def test_words_of_the_operation_that_look_like_a_cut_are_none() -> None:
    half = OUTPUT_LIMIT_BYTES // 2
    sent = b"x" * half + b"\n[... 70000000 bytes cut out ...]\n"
    answer = driver(b"{}", iter([sent])).call("intermediate_score", timeout_seconds=60)
    assert answer.stdout_size == StreamSize(len(sent), len(sent) - ANSWER_OUTPUT_BYTES)


def test_endless_output_is_refused_and_does_not_fill_the_disk(tmp_path: Path) -> None:
    def endless() -> Iterator[bytes]:
        while True:
            yield b"x" * 65536

    with pytest.raises(TaskError, match="more than 16 MiB of output"):
        driver(b"{}", endless(), tmp_path).call("start", timeout_seconds=60)
    assert (tmp_path / "start.log").stat().st_size <= STREAM_LIMIT_BYTES
