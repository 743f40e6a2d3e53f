"""Tests that an error's text says all that is known, and no secret."""

from __future__ import annotations

import io
import json
import re
import traceback
from pathlib import Path

import pytest
from inspect_ai.log._log import eval_error
from rich.console import Console

from provisioner.errors import HostError, ImageBuildError, Interrupted, ProvisionerError, TaskError, UsageError
from provisioner.inspect.failures import MOST_CHARACTERS, PreparationError, before_samples, told_in_full
from provisioner.inspect.private import PrerequisiteError
from provisioner.redaction import Redactor

# What Inspect has room for on a terminal, beside its own words.
SCREEN_LINES = 20


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home, in whose archive long texts are kept."""
    monkeypatch.setenv("PROVISIONER_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_details_and_hint_are_told_without_secrets() -> None:
    redactor = Redactor({"TOKEN": "s3cret-value"})
    details = "Traceback:\n  key = 's3cret-value'\x1b[2J\nValueError: no"
    with pytest.raises(TaskError) as raised, told_in_full(redactor):
        raise TaskError("start() raised with s3cret-value.", details=details, hint="Mend it.")
    text = str(raised.value)
    assert text.startswith("start() raised with [redacted:TOKEN].\nTraceback:\n")
    assert text.endswith("ValueError: no\nMend it.")
    assert "s3cret" not in text
    assert "\x1b" not in text


def _fail(secret: str) -> None:
    try:
        raise ValueError(f"the cause has {secret}")
    except ValueError as error:
        raise TaskError(f"It has {secret}.\x1b]0;PWNED", details="more", hint="Mend it.") from error


def test_inspects_log_has_no_secret_and_steers_no_terminal() -> None:
    secret = "-".join(("s3cret", "value"))
    with pytest.raises(TaskError) as raised, told_in_full(Redactor({"TOKEN": secret})):
        _fail(secret)
    logged = eval_error(raised.value, raised.type, raised.value, raised.tb)
    assert logged.message.endswith("\nmore\nMend it.")
    assert "\x1b" not in logged.message
    for text in (logged.message, logged.traceback, logged.traceback_ansi):
        assert "PWNED" in text
        assert secret not in text


@pytest.mark.parametrize("kind", [HostError, ImageBuildError, UsageError], ids=["host", "image", "usage"])
def test_what_stops_an_eval_is_told_as_a_prerequisite_on_one_screen(kind: type[ProvisionerError]) -> None:
    details = "\n".join(f"line {number} [of many]" for number in range(1000))
    with pytest.raises(PreparationError) as raised, before_samples(), told_in_full():
        raise kind("It failed.", details=details, hint="Mend it.")
    assert isinstance(raised.value, PrerequisiteError)
    said = str(raised.value).splitlines()
    assert said[0] == "It failed."
    assert {"line 0 [of many]", "line 999 [of many]", "Mend it."} <= set(said)
    assert len(said) <= SCREEN_LINES


def test_the_message_names_the_file_with_all_of_it(home: Path) -> None:
    secret = "-".join(("s3cret", "value"))
    details = "\n".join(f"line {number} {secret}\x1b[2J" for number in range(1000))
    with pytest.raises(TaskError) as raised, told_in_full(Redactor({"TOKEN": secret})):
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
    with pytest.raises(PreparationError) as raised, before_samples(), told_in_full():
        Path("/proc/home").mkdir()
    assert str(raised.value).splitlines() == [
        "/proc/home: No such file or directory.",
        "Look at the permissions and the disk there, or name another home: PROVISIONER_HOME=DIRECTORY.",
    ]
    with pytest.raises(OSError, match="a bug"), before_samples(), told_in_full():
        raise OSError("a bug")


def test_a_short_message_names_no_file(home: Path) -> None:
    with pytest.raises(TaskError) as raised, told_in_full():
        raise TaskError("It failed.", details="line", hint="Mend it.")
    assert str(raised.value) == "It failed.\nline\nMend it."
    assert not home.exists()


def test_a_home_that_cannot_be_written_hides_no_error(home: Path) -> None:
    home.write_text("no directory")
    with pytest.raises(TaskError, match=r"^It failed\.\n0\n"), told_in_full():
        raise TaskError("It failed.", details="\n".join(map(str, range(1000))))


def _deep(levels: int) -> None:
    if levels:
        _deep(levels - 1)
    raise TaskError("It failed.")


def test_a_samples_error_comes_without_the_frames_that_led_to_it() -> None:
    with pytest.raises(TaskError) as raised, told_in_full():
        _deep(30)
    assert "_deep" not in "".join(traceback.format_exception(raised.value))


def test_a_long_output_keeps_both_ends_within_bounds() -> None:
    with pytest.raises(TaskError) as raised, told_in_full():
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
    with pytest.raises(Interrupted) as raised, told_in_full():
        raise Interrupted("Inspect cancelled it.", hint="none")
    assert str(raised.value) == "Inspect cancelled it."
