"""The documentation names what the code has, and its links lead somewhere."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.main import get_command

from provisioner.base.config import Settings
from provisioner.base.errors import FAMILIES_PAGE, Section
from provisioner.cli.app import app
from provisioner.family.findings import RULES_PAGE, Rule
from tests.command_line import ROOT

REFERENCE = ROOT / "docs" / "reference"
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


def headings(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_page_and_a_heading(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        path, _, heading = link.partition("#")
        target = page.parent / path if path else page
        if not link.startswith("https://") and (not target.exists() or (heading and heading not in headings(target))):
            broken.append(link)
    assert broken == []


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    names = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    assert [name for name in names if name != "README.md" and f"]({name})" not in index] == []


def test_the_readme_says_that_no_account_has_run_aws() -> None:
    about_clouds = (ROOT / "README.md").read_text().partition("## Two commands")[0]
    assert "no AWS account has run it yet" in about_clouds
    assert "`provisioner aws check`" in about_clouds
    assert "less than a dollar" in about_clouds


def options(command: Any) -> set[str]:
    """The long options of a command and of those below it."""
    own = {option for parameter in command.params for option in parameter.opts if option.startswith("--")}
    return own.union(*(options(below) for below in getattr(command, "commands", {}).values()))


def test_the_reference_names_every_option() -> None:
    reference = (REFERENCE / "commands.md").read_text()
    assert sorted(option for option in options(get_command(app)) if f"`{option}" not in reference) == []


def test_the_reference_names_every_setting() -> None:
    reference = (REFERENCE / "settings.md").read_text()
    assert [
        name for name in Settings.model_fields if f"`{name}`" not in reference and f"`[{name}]`" not in reference
    ] == []


def command_lines() -> list[str]:
    """The lines of the documentation's indented blocks that run provisioner, by hand or from cron."""
    command = re.compile(r"^ {4,}(?:0 \* \* \* \* )?(provisioner .*)$", re.MULTILINE)
    texts = [page.read_text().replace("\\\n", " ") for page in PAGES]
    return sorted({line.strip() for text in texts for line in command.findall(text)})


@pytest.mark.parametrize("line", command_lines())
def test_every_documented_command_line_is_understood(line: str) -> None:
    _, *words = itertools.takewhile(lambda word: word != ">", shlex.split(line, comments=True))
    command: Any = get_command(app)
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    with command.make_context(line, words):
        pass


def test_every_attack_is_linked_from_the_page_on_security() -> None:
    text = (ROOT / "docs" / "security.md").read_text()
    attacks = [path.name for path in sorted((ROOT / "tests" / "attacks").glob("test_*.py"))]
    assert attacks
    assert [name for name in attacks if f"tests/attacks/{name})" not in text] == []


def named_sections() -> list[tuple[str, str]]:
    """The pages and headings that the program's messages name, each with the file that names it."""
    folders = ((ROOT / "provisioner", "*.py"), (ROOT / "provisioner", "*.sh"), (ROOT / "templates", "*.j2"))
    files = [path for folder, pattern in folders for path in folder.rglob(pattern)]
    pattern = re.compile(r"docs/[\w/-]+\.(?:md|json)(?:#[\w-]+)?")
    named = {(link, str(path.relative_to(ROOT))) for path in files for link in pattern.findall(path.read_text())}
    named -= {each for each in named if each[0].startswith("docs/interop/")}  # QEMU's
    sections = {f"{FAMILIES_PAGE}#{section}": "an error" for section in get_args(Section)}
    rules = {f"{RULES_PAGE}#{rule}": "a rule" for rule in get_args(Rule)}
    return sorted(named | set(sections.items()) | set(rules.items()))


@pytest.mark.parametrize(("link", "by"), named_sections())
def test_a_section_that_a_message_names_exists(link: str, by: str) -> None:
    path, _, heading = link.partition("#")
    assert (ROOT / path).is_file(), by
    assert not heading or heading in headings(ROOT / path), by
