"""Runs the pages for authors of families as their readers would, with the examples that they use, in real machines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from provisioner.store.home import Home
from tests.pages import AUTHORING
from tests.reader import Reader, reading

pytestmark = [pytest.mark.vm, pytest.mark.timeout(1800)]
# Pages that use one example: each brings it up and destroys it, and here they share one.
GUESTBOOK_PAGES = ("from-docker", "daemons", "protected-scoring")
GUESTBOOK_UP = "provisioner test examples/guestbook main --keep"
GUESTBOOK_DOWN = "provisioner destroy guestbook-main"


@pytest.fixture
def reader(test_home: Home, tmp_path: Path) -> Iterator[Reader]:
    with reading(test_home, tmp_path) as somebody:
        yield somebody


def test_the_tutorial_leads_from_an_idea_to_a_score(reader: Reader) -> None:
    reader.read(AUTHORING / "tutorial.md")


def test_install_is_debugged_in_an_example_with_internet(reader: Reader) -> None:
    reader.read(AUTHORING / "debug-install.md")


def test_the_pages_on_docker_and_scoring_share_an_example(reader: Reader) -> None:
    reader.paste(GUESTBOOK_UP)
    for name in GUESTBOOK_PAGES:
        page = AUTHORING / f"{name}.md"
        assert GUESTBOOK_UP in page.read_text()
        assert GUESTBOOK_DOWN in page.read_text()
        reader.read(page, leave_out=(GUESTBOOK_UP, GUESTBOOK_DOWN))
    reader.paste(GUESTBOOK_DOWN)
