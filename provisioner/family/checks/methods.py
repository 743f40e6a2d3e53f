"""Checks how the functions of a family's class are written: what they take, and how the class hands them out."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator

from provisioner.family.checks.finding import Finding, Level
from provisioner.family.checks.source import ATTRIBUTES, FUNCTIONS, FamilySource, FunctionNode, kind_of

_ARGUMENTS = ("no argument", "the task", "the task and the submission")
_AGGREGATE_ARGUMENTS = "the task and the score log"
_PARAMETERS = {0: "", 1: "t", 2: "t, submission"}
# An environment comes to a result without them, or whatever they do.
_HARMLESS = frozenset({"teardown"})
# Their results are not looked at: what never runs is missed only later.
_WITHOUT_RESULT = frozenset({"install", "start", "teardown"})
_ALIKE = 0.8
# Comparing names takes long.
_MAXIMUM_MEMBERS = 500


def method_findings(source: FamilySource) -> Iterator[Finding]:
    """Yields what is wrong with the functions' signatures and names, and what is missing."""
    for name, count in FUNCTIONS.items():
        if function := source.function(name):
            yield from _signature(source, function, count)
    yield from _misspelt(source)
    yield from _missing(source)


def _signature(source: FamilySource, function: FunctionNode, count: int) -> Iterator[Finding]:
    name = function.name
    given = count + (kind_of(function) == "class")
    parameters = _PARAMETERS[count] if name != "aggregate_scores" else "t, score_log"
    if not _takes(function.args, given) and not (name == "teardown" and _takes(function.args, given - 1)):
        arguments = _AGGREGATE_ARGUMENTS if name == "aggregate_scores" else _ARGUMENTS[count]
        yield Finding(
            _level(source, name), "wrong-parameters", source.file, function.lineno,
            f"{name}({_shown(function.args)}) cannot be called with {arguments}.",
            f"provisioner calls TaskFamily.{name}({parameters}), on the class.",
            f"Write @staticmethod and def {name}({parameters}).",
        )  # fmt: skip
    if isinstance(function, ast.AsyncFunctionDef):
        yield Finding(
            "warning" if name in _WITHOUT_RESULT else _level(source, name), "async-method", source.file,
            function.lineno, f"{name} is async.", "Nothing awaits it, so its body never runs.",
            f"Write def {name}, and asyncio.run(...) inside where something has to be awaited.",
        )  # fmt: skip


def _level(source: FamilySource, name: str) -> Level:
    """Returns how bad it is if a function fails: score() is not called where aggregate_scores() decides."""
    unused = name in _HARMLESS or (name == "score" and not source.lacks("aggregate_scores"))
    return "warning" if unused else "error"


def _takes(parameters: ast.arguments, count: int) -> bool:
    """Returns whether a function can be called with so many positional arguments."""
    positional = [*parameters.posonlyargs, *parameters.args]
    required = len(positional) - len(parameters.defaults)
    keywords = any(default is None for default in parameters.kw_defaults)
    return required <= count and (count <= len(positional) or parameters.vararg is not None) and not keywords


def _shown(parameters: ast.arguments) -> str:
    # Not by ast.unparse(): a default value may be nested too deep for it.
    names = [each.arg for each in (*parameters.posonlyargs, *parameters.args)]
    names += [f"*{parameters.vararg.arg}"] if parameters.vararg else []
    names += [f"{each.arg}=" for each in parameters.kwonlyargs]
    return ", ".join([*names, *([f"**{parameters.kwarg.arg}"] if parameters.kwarg else [])])


def _misspelt(source: FamilySource) -> Iterator[Finding]:
    known = [*FUNCTIONS, *ATTRIBUTES]
    if len(source.members) > _MAXIMUM_MEMBERS:
        return
    for name in sorted(source.members.keys() - set(known)):
        near = difflib.get_close_matches(name, known, n=1, cutoff=_ALIKE) if len(name) < 64 else []
        if near and source.lacks(near[0]) and not name.startswith("_"):
            yield Finding(
                "warning", "misspelt-name", source.file, source.members[name][0].lineno,
                f"{name} looks like {near[0]}, which the class does not have.",
                "The Task Standard knows no such name, so provisioner never looks at it.",
                f"Call it {near[0]}, or, if it is another thing, give it a name that begins with _.",
            )  # fmt: skip


def _missing(source: FamilySource) -> Iterator[Finding]:
    line = source.definition.lineno if source.definition else None
    if source.lacks("get_instructions"):
        yield Finding(
            "warning", "missing-instructions", source.file, line, "The class has no get_instructions.",
            "The agent's instructions.txt will be empty.", "Add get_instructions(t), which returns a string.",
        )  # fmt: skip
    if source.lacks("score") and source.lacks("aggregate_scores"):
        yield Finding(
            "warning", "no-score", source.file, line, "The class has neither score nor aggregate_scores.",
            "A run ends as not_scored. Intermediate scores alone are no end score.",
            "Add score(t, submission); or aggregate_scores(t, score_log), with intermediate_score.",
        )  # fmt: skip
    elif source.lacks("score") and source.lacks("intermediate_score"):
        yield Finding(
            "warning", "no-score", source.file, line, "The class has aggregate_scores, but no intermediate_score.",
            "There is never anything to aggregate: the score log stays empty.", "Add intermediate_score(t).",
        )  # fmt: skip
