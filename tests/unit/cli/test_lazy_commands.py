"""Commands that are imported on first need look like any others."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from provisioner.cli.lazy_commands import lazy_app

PACKAGE = "animals"
MODULES = {
    "zoo": """
from provisioner.cli.output import Result

COMMANDS = {
    "feed": (lambda: Result({}, "fed"), "Feed the animals."), "count": (lambda: Result({}, "3"), "Count the animals."),
}
""",
    "park": """
from provisioner.cli.output import Result

def main() -> Result:
    return Result({}, "parked")
""",
}


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[typer.Typer]:
    (tmp_path / PACKAGE).mkdir()
    for name, text in MODULES.items():
        (tmp_path / PACKAGE / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    commands = {"zoo": "Keep animals.", "park": "Park the car.", "close": "Close the gates."}
    yield lazy_app(PACKAGE, commands, callback=lambda: None)
    for module in imported():
        del sys.modules[module]


def imported() -> set[str]:
    return {name for name in sys.modules if name.startswith(PACKAGE)}


def run(app: typer.Typer, *arguments: str, **variables: str) -> Result:
    return CliRunner().invoke(app, arguments, env=variables, prog_name="program")


def test_other_commands_run_without_the_groups_module(app: typer.Typer) -> None:
    assert "zoo    Keep animals." in run(app, "--help").stdout
    assert not imported()
    assert run(app, "park").stdout == "parked\n"
    assert imported() == {PACKAGE, f"{PACKAGE}.park"}


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
