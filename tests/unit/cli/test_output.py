"""Tests that --json prints strict JSON, whatever a family's scores contain."""

from __future__ import annotations

import io
import json
import math
from typing import NoReturn

import pytest

from provisioner.base.errors import TaskError
from provisioner.cli.output import Result, render
from provisioner.cli.terminal import render_error


def refuse(constant: str) -> NoReturn:
    raise AssertionError(f"{constant} is not JSON")


def test_a_machines_words_do_not_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "\x1b]0;title\x07\x1b[2Jgone \u202egnp.exe [bold]"
    render_error(TaskError(hostile, hint=hostile, details=f"{hostile}\n{hostile}"), as_json=False)
    said = capsys.readouterr().err
    assert not {"\x1b", "\x07", "\u202e"} & set(said)
    assert said.count("gone") == 4
    assert "[bold]" in said


def test_numbers_that_json_does_not_have_become_null() -> None:
    out = io.StringIO()
    render(Result({"score": math.nan, "log": [{"details": {"a": -math.inf, "b": 0.5}}]}), as_json=True, out=out)
    assert json.loads(out.getvalue(), parse_constant=refuse) == {
        "schema": 1,
        "ok": True,
        "score": None,
        "log": [{"details": {"a": None, "b": 0.5}}],
    }
