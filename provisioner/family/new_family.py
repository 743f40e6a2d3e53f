"""Writes a small family that works, for an author to begin with. Its texts are templates in templates/family."""

from __future__ import annotations

import keyword
import shutil
import sys
from pathlib import Path

from jinja2 import Environment as Jinja
from jinja2 import FileSystemLoader, StrictUndefined

from provisioner.base.config import data_directory
from provisioner.base.errors import TaskFamilyError
from provisioner.base.validation import shown
from provisioner.family.findings import INSTALLED
from provisioner.family.loader import family_name

_TEMPLATES = "family"
_AUX_FILES = ("aux/number.service", "aux/number.txt")


def write_family(path: Path, *, aux: bool, intermediate: bool) -> tuple[str, ...]:
    """Writes a new family.

    Args:
        path: the directory, which must not exist; its last part is the family's name.
        aux: whether its tasks have an aux VM.
        intermediate: whether it has intermediate scoring.

    Returns:
        the files, relative to the directory.

    Raises:
        TaskFamilyError: the name is not allowed, or the directory exists or cannot be written.
    """
    name = _new_name(path)
    texts = _texts(name, aux=aux, intermediate=intermediate)
    try:
        path.mkdir()  # fails if anything of this name exists, a link too
    except FileExistsError:
        raise TaskFamilyError(
            f"{shown(str(path))} exists already.", hint="Give a directory that does not exist: nothing is overwritten."
        ) from None
    except OSError as error:
        hint = "" if path.parent.exists() else f"Create {shown(str(path.parent))} first."
        raise TaskFamilyError(f"{shown(str(path))} cannot be created: {error.strerror}.", hint=hint or None) from error
    try:
        for file, text in texts.items():
            (path / file).parent.mkdir(exist_ok=True)
            (path / file).write_text(text)
    except OSError as error:
        shutil.rmtree(path, ignore_errors=True)
        raise TaskFamilyError(f"{shown(str(path))} cannot be written: {error.strerror}.") from error
    return tuple(sorted(texts))


def _new_name(path: Path) -> str:
    """Returns the name of a family that is to be written. Its module must not hide another, or be a test."""
    name = family_name(path)
    if keyword.iskeyword(name) or name in sys.stdlib_module_names | INSTALLED:
        raise TaskFamilyError(
            f"A family cannot be called {shown(name)}: its module {name}.py would hide Python's own.",
            hint="Choose a name that says what the tasks are about.",
        )
    if name.startswith("test_") or name.endswith("_test"):
        raise TaskFamilyError(f"A family cannot be called {shown(name)}: pytest would take its module for tests.")
    return name


def _texts(name: str, *, aux: bool, intermediate: bool) -> dict[str, str]:
    directory = data_directory("templates") / _TEMPLATES
    jinja = Jinja(  # noqa: S701 - it renders Python, YAML and Markdown, not HTML
        loader=FileSystemLoader(directory),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates = {
        f"{name}.py": "module.py.j2",
        f"test_{name}.py": "test.py.j2",
        "manifest.yaml": "manifest.yaml.j2",
        "README.md": "README.md.j2",
    }
    texts = {
        file: jinja.get_template(template).render(name=name, aux=aux, intermediate=intermediate)
        for file, template in templates.items()
    }
    return texts | {file: (directory / file).read_text() for file in _AUX_FILES if aux}
