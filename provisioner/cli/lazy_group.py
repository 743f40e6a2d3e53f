"""Groups of commands that cost nothing until they are used: their modules are imported on first need.

`provisioner --help` and the shell's completion list such a group by the name and help that are given here.
"""

from __future__ import annotations

import importlib
from collections.abc import MutableMapping

import typer
from typer._click import Command  # Typer carries its own click, and does not export the type of commands
from typer.core import TyperGroup
from typer.main import get_group


def add_lazy_group(app: typer.Typer, name: str, module: str, help: str) -> None:
    """Adds a group of commands whose module is imported only when one of them, or the group's help, is asked for.

    Args:
        app: the Typer application that gets the group.
        name: the group's name on the command line.
        module: the full name of a module with a function `register`, which adds the commands to a Typer application.
        help: the group's line in the help.
    """

    class Group(_LazyGroup):
        module_name = module

    app.add_typer(typer.Typer(cls=Group, no_args_is_help=True, help=help, rich_markup_mode=None), name=name)


class _LazyGroup(TyperGroup):
    """Imports its commands when somebody looks at them."""

    module_name: str
    _imported: MutableMapping[str, Command] | None = None

    @property
    def commands(self) -> MutableMapping[str, Command]:
        """The commands by name, imported when they are first read."""
        if self._imported is None:
            app = typer.Typer(rich_markup_mode=None)
            importlib.import_module(self.module_name).register(app)
            self._imported = get_group(app).commands
        return self._imported

    @commands.setter
    def commands(self, commands: MutableMapping[str, Command]) -> None:
        """Ignores the empty mapping that Typer's own constructor assigns."""
