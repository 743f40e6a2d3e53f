"""Tests which private names of Inspect are used, and that the provider works where they are missing."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from provisioner.inspect import private
from provisioner.inspect.origin import Origin

NAMES = ("inspect_ai._util.error", "inspect_ai._util.registry", "inspect_ai.log._samples")


def _of_an_inspect_without_them(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for name in NAMES:
        monkeypatch.setitem(sys.modules, name, None)
    spec = importlib.util.spec_from_file_location("private_without", private.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_other_module_imports_private_names_of_inspect() -> None:
    directory = Path(private.__file__).parent
    imports = re.compile(r"^\s*(from|import) inspect_ai(\.\w+)*\._|^\s*from inspect_ai\S* import _", re.MULTILINE)
    using = {path.name for path in directory.glob("*.py") if imports.search(path.read_text())}
    assert using == {"private.py"}


def test_without_them_a_sample_has_its_id_and_the_default_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    without = _of_an_inspect_without_them(monkeypatch)
    assert without.origin_of_sample("task", 3) == Origin("task", sample="3")
    assert without.origin_of_sample("task", None) == Origin("task")
    without.registry_add(print, None)
    assert issubclass(without.PrerequisiteError, Exception)


def test_a_sample_is_named_by_the_id_that_sample_init_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    active = SimpleNamespace(
        sample=SimpleNamespace(id="of the log"), epoch=2, eval_id="eval", time_limit=60, working_limit=30
    )
    monkeypatch.setattr(private, "sample_active", lambda: active)
    assert private.origin_of_sample("task", "given") == Origin("task", "eval", "given (epoch 2)", 60, 30)
    assert private.origin_of_sample("task", None) == Origin("task", "eval", "of the log (epoch 2)", 60, 30)
