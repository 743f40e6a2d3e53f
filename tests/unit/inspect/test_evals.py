"""Tests which private names of Inspect are used, and that the provider works where they are missing."""

from __future__ import annotations

import importlib.util
import re
import sys
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from provisioner.inspect import evals
from provisioner.inspect.configuration import Configuration
from provisioner.inspect.evals import Origin, time_to_live

NAMES = ("inspect_ai._util.error", "inspect_ai._util.registry", "inspect_ai.log._samples")


def _of_an_inspect_without_them(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for name in NAMES:
        monkeypatch.setitem(sys.modules, name, None)
    spec = importlib.util.spec_from_file_location("private_without", evals.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_no_other_module_imports_private_names_of_inspect() -> None:
    directory = Path(evals.__file__).parent
    imports = re.compile(r"^\s*(from|import) inspect_ai(\.\w+)*\._|^\s*from inspect_ai\S* import _", re.MULTILINE)
    using = {path.name for path in directory.glob("*.py") if imports.search(path.read_text())}
    assert using == {"evals.py"}


def test_without_them_a_sample_has_its_id_and_the_default_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    without = _of_an_inspect_without_them(monkeypatch)
    for sample_id, origin in ((3, Origin("task", sample="3")), (None, Origin("task"))):
        assert vars(without.origin_of_sample("task", sample_id)) == vars(origin)
    without.registry_add(print, None)
    assert issubclass(without.PrerequisiteError, Exception)


def test_a_sample_is_named_by_the_id_that_sample_init_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    active = SimpleNamespace(
        sample=SimpleNamespace(id="of the log"), epoch=2, eval_id="eval", time_limit=60, working_limit=30
    )
    monkeypatch.setattr(evals, "sample_active", lambda: active)
    assert evals.origin_of_sample("task", "given") == Origin("task", "eval", "given (epoch 2)", 60, 30)
    assert evals.origin_of_sample("task", None) == Origin("task", "eval", "of the log (epoch 2)", 60, 30)


HOUR = 3600.0


@pytest.mark.parametrize(
    ("ttl", "time_limit", "working_limit", "hours", "told"),
    [
        ("", None, None, 4, ""),
        ("", 2 * HOUR, None, 4, ""),
        ("", HOUR / 2, None, 1.75, ""),
        ("", HOUR / 2, 10 * HOUR, 1.75, ""),
        ("", None, HOUR / 2, 4, ""),
        ("", None, 10 * HOUR, 16, ""),
        ("", 200 * HOUR, None, 168, "Give the sample a shorter limit: `ttl` can be at most 7d."),
        ("", None, 200 * HOUR, 168, "Give the sample a shorter limit: `ttl` can be at most 7d."),
        ("3h", None, None, 3, ""),
        ("3h", 2 * HOUR, None, 3, "Set `ttl` to at least 3h15m (at most 7d)."),
        ("3h15m", 2 * HOUR, None, 3.25, ""),
        ("3h", None, 2 * HOUR, 3, "Set `ttl` to at least 3h15m (at most 7d)."),
    ],
)
def test_the_time_to_live_follows_from_the_limits(
    ttl: str, time_limit: float | None, working_limit: float | None, hours: float, told: str
) -> None:
    notes: list[str] = []
    origin = Origin("task", time_limit_seconds=time_limit, working_limit_seconds=working_limit)
    assert time_to_live(Configuration(ttl=ttl), origin, notes.append) == timedelta(hours=hours)
    assert len(notes) == bool(told)
    assert all(note.endswith(told) for note in notes)
