"""What --json prints is strict JSON, whatever a family's scores hold."""

from __future__ import annotations

import io
import json
import math
from typing import NoReturn

from provisioner.cli.output import Result, render


def refuse(constant: str) -> NoReturn:
    raise AssertionError(f"{constant} is not JSON")


def test_numbers_that_json_does_not_have_become_null() -> None:
    out = io.StringIO()
    render(Result({"score": math.nan, "log": [{"details": {"a": -math.inf, "b": 0.5}}]}), as_json=True, out=out)
    assert json.loads(out.getvalue(), parse_constant=refuse) == {
        "schema": 1,
        "ok": True,
        "score": None,
        "log": [{"details": {"a": None, "b": 0.5}}],
    }
