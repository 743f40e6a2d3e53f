#!/usr/bin/env python3
"""Writes the tables of docs/reference/task-families.md that the code knows: manifest, VMSpec, build steps, limits.

Usage: scripts/family_reference.py            prints the page with the tables of today
       scripts/family_reference.py --write    puts them into the page, each between its two marks
"""

from __future__ import annotations

import re
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "provisioner/guest")]

from provisioner_guest.family import results  # noqa: E402
from pydantic import BaseModel  # noqa: E402
from pydantic.fields import FieldInfo  # noqa: E402

from provisioner.base.models import FileBuildStep, ShellBuildStep, VMSpec  # noqa: E402
from provisioner.environment import operations  # noqa: E402
from provisioner.family import build_steps, env_file, files, loader, manifest, setup_data  # noqa: E402

PAGE = ROOT / "docs" / "reference" / "task-families.md"
PLAIN = {str: "string", bool: "`true` or `false`", float: "number", int: "whole number", object: "anything"}


def kind(annotation: Any) -> str:
    """What a field holds, in words."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return kind(arguments[0])
    if origin is typing.Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(kind(each) for each in arguments if each is not type(None))
    if origin is tuple and arguments[-1] is not Ellipsis:
        return f"two {kind(arguments[0])}s"
    if origin in (list, tuple):
        return f"list of {PLAIN[arguments[0]]}s" if arguments[0] in PLAIN else "list"
    return "mapping" if origin is dict or issubclass(annotation, BaseModel) else PLAIN[annotation]


def default(field: FieldInfo) -> str:
    """What a field is where nothing is said."""
    if field.is_required():
        return "required"
    plain = isinstance(field.default, str | bool | int | float)
    return f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`" if plain else "-"


def fields(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """A model's fields, each with its path and followed by those of the models in it."""
    for name, field in model.model_fields.items():
        if "SkipJsonSchema" in {type(each).__name__ for each in field.metadata}:  # follows from other fields
            continue
        yield f"{path}{name}", field
        for inner in models_in(field.annotation):
            many = typing.get_origin(field.annotation) is dict
            yield from fields(inner, f"{path}{name}.{'NAME.' if many else ''}")


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """The models that a field may hold; build steps have a table of their own."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    inner = [model for each in typing.get_args(annotation) for model in models_in(each)]
    return [model for model in inner if model not in (FileBuildStep, ShellBuildStep)]


def words(field: FieldInfo) -> str:
    """A field's description."""
    if not field.description:
        raise ValueError(f"a field of {PAGE.name} has no description: {field!r}")
    return field.description


def table(heads: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def model_table(head: str, *shown: type[BaseModel]) -> str:
    """The table of what models may hold."""
    rows = [
        [f"`{name}`", kind(field.annotation), default(field), words(field)]
        for model in shown
        for name, field in fields(model)
    ]
    return table([head, "value", "default", "meaning"], rows)


def size(count: int) -> str:
    """A number of bytes in words."""
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB"


def limits() -> str:
    """The table of limits."""
    rows = {
        "the family's name": f"{loader.MAXIMUM_NAME_CHARACTERS} characters",
        "its files": f"{files.MAXIMUM_FILES:,}, {files.MAXIMUM_TOTAL_BYTES >> 30} GiB in total",
        "manifest": size(manifest.MAXIMUM_BYTES),
        "build_steps.json": f"{size(build_steps.MAXIMUM_BYTES)}, {build_steps.MAXIMUM_STEPS:,} steps",
        "tasks": f"{setup_data.MAXIMUM_TASKS:,}",
        "a task's name": f"{setup_data.MAXIMUM_TASK_NAME_CHARACTERS} characters, none of them a control character",
        "a task's instructions": size(setup_data.MAXIMUM_INSTRUCTIONS_BYTES),
        "required variables": f"{setup_data.MAXIMUM_VARIABLES:,}",
        "a GPU's name": f"{setup_data.MAXIMUM_MODEL_CHARACTERS} characters",
        "the env file": size(env_file.MAXIMUM_FILE_BYTES),
        "a variable's value": f"less than {size(env_file.MAXIMUM_VALUE_BYTES)}",
        "submission": size(operations.SUBMISSION_LIMIT_BYTES),
        "what a function returns": f"{size(results.MAX_BYTES)}, {results.MAX_DEPTH} levels deep",
        "score log": size(operations.SCORE_LOG_BYTES),
    }
    return table(["what", "at most"], [list(row) for row in rows.items()])


def tables() -> dict[str, str]:
    """The tables by the name in their marks."""
    return {
        "manifest": model_table("key", manifest.Manifest),
        "vmspec": model_table("key", VMSpec),
        "build steps": model_table("key", FileBuildStep, ShellBuildStep),
        "limits": limits(),
    }


def page() -> str:
    """The page with the tables of today."""
    text = PAGE.read_text()
    for name, drawn in tables().items():
        begin, end = f"<!-- scripts/family_reference.py: {name} -->", "<!-- end -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{end}", re.DOTALL)
        if len(pattern.findall(text)) != 1:
            raise ValueError(f"{PAGE.name} must have {begin} once, and {end} after it")
        text = pattern.sub(f"{begin}\n{drawn}\n{end}".replace("\\", r"\\"), text)
    return text


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page())
    elif sys.argv[1:]:
        sys.exit(__doc__)
    else:
        print(page(), end="")
