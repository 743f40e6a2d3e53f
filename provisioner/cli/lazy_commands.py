"""Defers the import of commands' modules until the commands are used.

The program's help and the shell's completion list the commands by the names and the help given here.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, cast

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

from provisioner.base.errors import extras_named


def lazy_app(package: str, commands: Mapping[str, str], **settings: Any) -> typer.Typer:
    """Makes a Typer application whose commands are imported when they are used.

    Args:
        package: the package in which each command has a module of its name, see command.register.
        commands: each command or group with its help. The program's help shows its first sentence.
        settings: passed to Typer.
    """

    class Group(TyperGroup):
        def __init__(self, **attributes: Any) -> None:
            super().__init__(**attributes)
            for name, line in commands.items():
                self.add_command(_LazyCommand(f"{package}.{name}", name, line))

    return typer.Typer(cls=Group, rich_markup_mode=None, **settings)


class _LazyCommand(TyperCommand):
    """Stands for a command or a group until it is run or its parameters are needed."""

    def __init__(self, module: str, name: str, line: str) -> None:
        self._module = module
        super().__init__(name, help=line, rich_markup_mode=None)

    @cached_property
    def _real(self) -> TyperCommand:
        # Typer makes a group only if there is a callback or the application has commands of its own.
        app = typer.Typer(rich_markup_mode=None, callback=lambda: None)
        with extras_named():
            from provisioner.cli.command import (
                register,
            )  # takes long to import, and the program's help needs no command

            register(app, str(self.name), self._module)
        real = cast(TyperCommand, get_group(app).commands[str(self.name)])
        real.help = self.help
        return real

    @property
    def params(self) -> Any:
        """Returns the real command's parameters."""
        return self._real.params

    @params.setter
    def params(self, params: Any) -> None:
        """Ignores the empty list that the constructor assigns."""

    @property
    def commands(self) -> Mapping[str, Any]:
        """Returns the commands of a group. On a command, raises AttributeError, as Typer does."""
        return cast(Mapping[str, Any], cast(Any, self._real).commands)

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Parses the arguments with the real command, whose context then runs that command."""
        return self._real.make_context(info_name, args, parent, **extra)
