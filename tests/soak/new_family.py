"""Runs what `provisioner new --aux --intermediate` writes, and the page with which a first family begins, in machines.

They build several images, which takes minutes: the campaign soak.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from provisioner.store.home import Home
from tests.command_line import answer, provisioner
from tests.pages import AUTHORING
from tests.reader import reading

pytestmark = pytest.mark.vm


def test_a_new_family_with_everything_passes_its_tests(test_home: Home, tmp_path: Path) -> None:
    family = str(tmp_path / "sums")
    answer(test_home, "new", family, "--aux", "--intermediate")
    tested = answer(test_home, "test", family, "small", "--keep")
    env = tested["environment"]
    try:
        assert tested["pytest_exit_code"] == 0
        work = "echo $(( 19 + $(curl -s aux:8000/number.txt) )) > submission.txt"
        done = provisioner(test_home, "exec", env, "--", "sh", "-c", work)
        assert done.returncode == 0, done.stderr
        scored = answer(test_home, "score", env)
        assert (scored["status"], scored["score"]) == ("scored", 1.0)
        assert [entry["score"] for entry in scored["score_log"]] == [None, 1.0]
    finally:
        answer(test_home, "destroy", env)


def test_the_page_on_writing_a_family_does_what_it_says(test_home: Home, tmp_path: Path) -> None:
    with reading(test_home, tmp_path) as reader:
        reader.read(AUTHORING / "write-a-family.md")
