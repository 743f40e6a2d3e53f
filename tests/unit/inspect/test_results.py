"""Tests that the ends of our calls become what Inspect expects of a sandbox."""

from __future__ import annotations

import errno

import pytest
from inspect_ai.util import OutputLimitExceededError, SandboxEnvironmentLimits, override_sandbox_output_limit
from inspect_ai.util._sandbox.events import SandboxEnvironmentProxy

from provisioner.errors import CommandTimeoutError
from provisioner.inspect.losses import Output, file_error, file_errors
from provisioner.ssh.exchange import Completed


def _output(stdout: bytes = b"", stderr: bytes = b"") -> Output:
    output = Output()
    output.stdout.write(stdout)
    output.stderr.write(stderr)
    return output


def _ended(code: int, number: int | None = None) -> Completed:
    return Completed(code, b"", b"", number)


def test_an_exit_code_and_text_that_is_no_utf8_are_a_result() -> None:
    result = _output(b"\xff", b"err").result(_ended(137))
    assert (result.success, result.returncode, result.stdout, result.stderr) == (False, 137, "\ufffd", "err")
    assert _output().result(_ended(0)).success


def test_a_program_without_permission_is_an_error() -> None:
    with pytest.raises(PermissionError, match="Permission denied"):
        _output(stderr=b"Permission denied").result(_ended(126, errno.EACCES))
    assert _output(stderr=b"said by a shell").result(_ended(126)).returncode == 126
    missing = _output(stderr=b"no user x").result(_ended(127, errno.ENOENT))
    assert (missing.returncode, missing.stderr) == (127, "no user x")


def test_time_that_is_over_keeps_the_output() -> None:
    output = _output(b"so far", b"and so on")
    assert output.timed_out(3, "late").truncated_output == "so farand so on"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOENT, FileNotFoundError),
        (errno.EACCES, PermissionError),
        (errno.EISDIR, IsADirectoryError),
        (errno.EFBIG, OutputLimitExceededError),
        # A model may name any path, and Inspect would end the sample for another kind of error.
        *(
            (number, PermissionError)
            for number in (errno.EINVAL, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.ENOSPC)
        ),
    ],
)
def test_errors_of_files_are_of_the_kind_that_inspect_expects(number: int, kind: type[Exception]) -> None:
    error = file_error(OSError(number, "why"), "some/file")
    assert isinstance(error, kind)
    if number == errno.EISDIR:
        assert "directory" in str(error)


def test_what_is_no_regular_file_is_said_in_words() -> None:
    error = file_error(OSError(errno.EINVAL, "Invalid argument"), "/dev/zero")
    assert (error.strerror, error.filename) == ("It is not a regular file", "/dev/zero")  # type: ignore[attr-defined]


def test_a_machine_that_fails_is_no_error_of_a_path() -> None:
    assert type(file_error(OSError(errno.EIO, "why"), "x")) is OSError


def test_a_file_that_takes_too_long_is_a_plain_time_out() -> None:
    with pytest.raises(TimeoutError, match="slow") as raised, file_errors("some/file"):
        raise CommandTimeoutError("slow")
    assert type(raised.value) is TimeoutError
    with pytest.raises(FileNotFoundError), file_errors("some/file"):
        raise OSError(errno.ENOENT, "why")


def test_output_over_the_limit_is_inspects_error() -> None:
    limit = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE
    output = _output(b"first" + b"x" * limit + b"last", b"err")
    result = output.result(_ended(0))
    assert "first" not in result.stdout
    assert result.stdout.startswith("\n[... 9 bytes cut out ...]\nx")
    with pytest.raises(OutputLimitExceededError) as raised:
        SandboxEnvironmentProxy.verify_exec_result_size(result)
    assert raised.value.truncated_output is not None
    assert raised.value.truncated_output.endswith("lasterr")


def test_output_of_just_the_limit_is_complete() -> None:
    limit = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE
    result = _output(b"x" * limit).result(_ended(0))
    assert result.stdout == "x" * limit
    SandboxEnvironmentProxy.verify_exec_result_size(result)


def test_the_limit_is_the_one_that_holds_when_the_command_begins() -> None:
    with override_sandbox_output_limit(4, "exec"):
        output = Output()
    output.stdout.write(b"12345678")
    assert output.result(_ended(0)).stdout == "\n[... 4 bytes cut out ...]\n5678"
