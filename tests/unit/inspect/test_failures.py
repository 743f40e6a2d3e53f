"""Tests that an error's text says all that is known, and no secret."""

from __future__ import annotations

import io
import json

import pytest
from inspect_ai.log._log import eval_error
from rich.console import Console

from provisioner.errors import Interrupted, TaskError, UsageError
from provisioner.inspect.failures import LAST_LINES, MOST_CHARACTERS, BadInputError, before_samples, told_in_full
from provisioner.redaction import Redactor


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


def test_a_long_output_keeps_both_ends_within_bounds() -> None:
    with pytest.raises(TaskError) as raised, told_in_full():
        raise TaskError("It failed.", details="\n".join(f"line {number} " + "x" * 50 for number in range(10_000)))
    assert "line 0 " in str(raised.value)
    assert "line 9999 " in str(raised.value)
    assert len(str(raised.value).splitlines()) < 2 * LAST_LINES
    with pytest.raises(TaskError) as raised, told_in_full():
        raise TaskError("It failed.", details="\n".join(["y" * 100_000] * 100))
    assert len(str(raised.value)) <= MOST_CHARACTERS


def test_brackets_of_bad_input_are_shown_as_they_stand() -> None:
    text = "The family fam cannot run:\n  fam.py:3: score takes one argument [wrong-arguments]"
    with pytest.raises(BadInputError) as raised, before_samples():
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
