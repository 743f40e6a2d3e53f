"""Tests that an error's text says all that is known, and no secret."""

from __future__ import annotations

import ast
import errno
import io
import json
import re
import traceback
from pathlib import Path

import pytest
from inspect_ai.log._log import eval_error
from inspect_ai.util import OutputLimitExceededError, SandboxEnvironmentLimits
from inspect_ai.util._sandbox.events import SandboxEnvironmentProxy
from rich.console import Console

from provisioner.base.errors import (
    BudgetError,
    CommandTimeoutError,
    HostError,
    ImageBuildError,
    Interrupted,
    MissingVariablesError,
    ProvisionerError,
    TaskError,
    UsageError,
)
from provisioner.base.redaction import Redactor
from provisioner.inspect.evals import PrerequisiteError
from provisioner.inspect.failures import (
    MOST_CHARACTERS,
    Output,
    PreparationError,
    before_samples,
    file_error,
    file_errors,
    full_message,
)
from provisioner.ssh.exchange import Completed

# What Inspect has room for on a terminal, beside its own words.
SCREEN_LINES = 20


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home, in whose archive long texts are kept."""
    monkeypatch.setenv("PROVISIONER_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def _fail(secret: str) -> None:
    try:
        raise ValueError(f"the cause has {secret}")
    except ValueError as error:
        raise TaskError(f"It has {secret}.\x1b]0;PWNED", details="more", hint="Mend it.") from error


def test_inspects_log_has_no_secret_and_steers_no_terminal(home: Path) -> None:
    secret = "-".join(("s3cret", "value"))
    with pytest.raises(TaskError) as raised, full_message(Redactor({"TOKEN": secret})):
        _fail(secret)
    logged = eval_error(raised.value, raised.type, raised.value, raised.tb)
    assert logged.message.startswith("It has [redacted:TOKEN].")
    assert logged.message.endswith("\nmore\nMend it.")
    assert not home.exists()  # a short message names no file
    assert "\x1b" not in logged.message
    for text in (logged.message, logged.traceback, logged.traceback_ansi):
        assert "PWNED" in text
        assert secret not in text


@pytest.mark.parametrize("kind", [HostError, ImageBuildError, UsageError], ids=["host", "image", "usage"])
def test_what_stops_an_eval_is_told_as_a_prerequisite_on_one_screen(kind: type[ProvisionerError]) -> None:
    details = "\n".join(f"line {number} [of many]" for number in range(1000))
    with pytest.raises(PreparationError) as raised, before_samples(), full_message():
        raise kind("It failed.", details=details, hint="Mend it.")
    assert isinstance(raised.value, PrerequisiteError)
    said = str(raised.value).splitlines()
    assert said[0] == "It failed."
    assert {"line 0 [of many]", "line 999 [of many]", "Mend it."} <= set(said)
    assert len(said) <= SCREEN_LINES


def test_the_message_names_the_file_with_all_of_it(home: Path) -> None:
    secret = "-".join(("s3cret", "value"))
    details = "\n".join(f"line {number} {secret}\x1b[2J" for number in range(1000))
    with pytest.raises(TaskError) as raised, full_message(Redactor({"TOKEN": secret})):
        raise TaskError("It failed.", details=details, hint="Mend it.")
    named = re.search("All of it: (.*)$", str(raised.value))
    assert named
    path = Path(named[1])
    assert path.parent == home / "archive"
    assert path.stat().st_mode & 0o077 == 0
    kept = path.read_text()
    assert kept.startswith("It failed.\nline 0 [redacted:TOKEN]")
    assert {"line 500 [redacted:TOKEN]", "Mend it."} <= set(kept.splitlines())
    assert f'File "{__file__}"' in kept
    assert secret not in kept
    assert "\x1b" not in kept


def test_what_this_host_refuses_is_told_with_its_path() -> None:
    with pytest.raises(PreparationError) as raised, before_samples(), full_message():
        Path("/proc/home").mkdir()
    assert str(raised.value).splitlines() == [
        "/proc/home: No such file or directory.",
        "Look at the permissions and the disk there, or name another home: PROVISIONER_HOME=DIRECTORY.",
    ]
    with pytest.raises(OSError, match="a bug"), before_samples(), full_message():
        raise OSError("a bug")


def test_a_home_that_cannot_be_written_hides_no_error(home: Path) -> None:
    home.write_text("no directory")
    with pytest.raises(TaskError, match=r"^It failed\.\n0\n"), full_message():
        raise TaskError("It failed.", details="\n".join(map(str, range(1000))))


def _deep(levels: int) -> None:
    if levels:
        _deep(levels - 1)
    raise TaskError("It failed.")


def test_a_samples_error_comes_without_the_frames_that_led_to_it() -> None:
    with pytest.raises(TaskError) as raised, full_message():
        _deep(30)
    assert "_deep" not in "".join(traceback.format_exception(raised.value))


def test_a_long_output_keeps_both_ends_within_bounds() -> None:
    with pytest.raises(TaskError) as raised, full_message():
        raise TaskError("It failed.", details="\n".join(["y" * 100_000] * 100))
    assert len(str(raised.value)) <= MOST_CHARACTERS


def test_brackets_of_bad_input_are_shown_as_they_stand() -> None:
    text = "The family fam cannot run:\n  fam.py:3: score takes one argument [wrong-arguments]"
    with pytest.raises(PreparationError) as raised, before_samples():
        raise UsageError(text)
    error = raised.value
    shown = io.StringIO()
    Console(file=shown, width=200).print(f"\n{error.message}\n")  # as Inspect's own hook does
    assert shown.getvalue().strip() == text
    logged = eval_error(error, type(error), error, error.__traceback__)
    assert logged.message == str(error) == text
    assert json.loads(logged.model_dump_json())["message"] == text


def test_a_cancellation_stays_as_it_is() -> None:
    with pytest.raises(Interrupted) as raised, full_message():
        raise Interrupted("Inspect cancelled it.", hint="none")
    assert str(raised.value) == "Inspect cancelled it."


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


PACKAGE = Path(__file__).parents[3] / "provisioner"
# What reaches Inspect's users: images, clouds, costs and environments. The command line's own messages are its own.
FOLDERS = (
    "base", "clouds", "copying", "costs", "driver", "family", "images", "isolation", "machines", "ssh", "store",
    "terraform",
)  # fmt: skip
OPTION = re.compile(r"--(?:cloud|region|profile|spot|state|ttl|budget|env-file|allow)(?![\w-])")


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_error_names_an_option_unless_in_a_whole_command(folder: str) -> None:
    sources = list((PACKAGE / folder).rglob("*.py"))
    assert sources
    for source in sources:
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "").endswith("Error"):
                texts = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
                assert not OPTION.search(re.sub("`provisioner [^`]*`", "", " ".join(map(str, texts)))), source


def test_an_error_and_bad_input_are_told_with_the_keys_that_they_are_about() -> None:
    with pytest.raises(BudgetError) as raised, full_message():
        raise BudgetError("It does not fit.", hint="Give it a shorter time to live.", settings=("ttl", "budget"))
    assert str(raised.value) == (
        "It does not fit.\nGive it a shorter time to live. "
        "In provisioner.yaml: `ttl` (-T ttl=TTL), `budget` (-T budget=USD)."
    )
    with (
        pytest.raises(PreparationError, match=r"not set: KEY\n.* `env_file` \(-T secrets_env_path=FILE"),
        before_samples(),
    ):
        raise MissingVariablesError(["KEY"])
