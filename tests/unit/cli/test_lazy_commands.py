"""Commands that are imported on first need look like any others."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from provisioner.cli.lazy_commands import lazy_app

MODULE = "commands_of_zoo"
COMMANDS = """
import typer

def register(app):
    zoo = typer.Typer(rich_markup_mode=None)
    zoo.command("feed", help="Feed the animals.")(lambda: print("fed"))
    zoo.command("count", help="Count the animals.")(lambda: print("3"))
    app.add_typer(zoo, name="zoo")
    app.command("close")(lambda: print("closed"))
"""
PARKING = "commands_of_parking"
PARKING_COMMANDS = """
def register(app):
    app.command("park")(lambda: print("parked"))
"""


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[typer.Typer]:
    (tmp_path / f"{MODULE}.py").write_text(COMMANDS)
    (tmp_path / f"{PARKING}.py").write_text(PARKING_COMMANDS)
    monkeypatch.syspath_prepend(tmp_path)
    commands = {"zoo": "Keep animals.", "park": "Park the car.", "close": "Close the gates."}
    yield lazy_app({name: (PARKING if name == "park" else MODULE, line) for name, line in commands.items()})
    for module in (MODULE, PARKING):
        sys.modules.pop(module, None)


def run(app: typer.Typer, *arguments: str, **variables: str) -> Result:
    return CliRunner().invoke(app, arguments, env=variables, prog_name="program")


def test_other_commands_run_without_the_groups_module(app: typer.Typer) -> None:
    assert "zoo    Keep animals." in run(app, "--help").stdout
    assert not {MODULE, PARKING} & sys.modules.keys()
    assert run(app, "park").stdout == "parked\n"
    assert MODULE not in sys.modules


def test_its_commands_run_and_its_help_lists_them_in_their_order(app: typer.Typer) -> None:
    assert run(app, "zoo", "count").stdout == "3\n"
    shown = run(app, "zoo", "--help").stdout
    assert "Keep animals." in shown
    assert shown.index("feed   Feed the animals.") < shown.index("count  Count the animals.")
    listed = run(app, "--help").stdout
    assert listed.index("zoo ") < listed.index("park ") < listed.index("close ")


def test_a_mistyped_command_is_answered_with_the_nearest(app: typer.Typer) -> None:
    done = run(app, "zoo", "cuont")
    assert done.exit_code == 2
    assert "Did you mean 'count'" in done.output


@pytest.mark.parametrize(("words", "offered"), [("program z", "zoo"), ("program zoo f", "feed")])
def test_the_shell_completes_the_group_and_its_commands(app: typer.Typer, words: str, offered: str) -> None:
    variables = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    assert run(app, _PROGRAM_COMPLETE="complete_bash", **variables).stdout.split() == [offered]
