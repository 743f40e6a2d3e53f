"""Tests the globs of a manifest: what they match, and that none leads out of the family."""

from __future__ import annotations

import pytest

from provisioner.errors import TaskFamilyError
from provisioner.family.files import check_glob, matching
from provisioner.family.manifest import parse_manifest

FILES = ("a", "a/b.txt", "a/c/.d.txt", "fam.py", "requirements.txt")


@pytest.mark.parametrize(
    ("glob", "files"),
    [
        ("requirements.txt", ["requirements.txt"]),
        ("*.txt", ["requirements.txt"]),
        ("a/**", ["a/b.txt", "a/c/.d.txt"]),
        ("**/*.txt", ["a/b.txt", "a/c/.d.txt", "requirements.txt"]),
        ("a/**/.d.txt", ["a/c/.d.txt"]),
        ("a/?.txt", ["a/b.txt"]),
        ("[!f]*", ["a", "requirements.txt"]),
        ("**", list(FILES)),
        ("A/*", []),
        ("b.txt", []),
    ],
)
def test_a_glob_matches(glob: str, files: list[str]) -> None:
    assert list(matching([check_glob(glob)], FILES)) == files


@pytest.mark.parametrize(
    "glob",
    ["", "/etc/passwd", "../other", "a/../../b", "a//b", "./a", "a/", "x" * 201, "a\\b", "a\nb", "a\0b",
     "**/" * 5 + "a"],
    ids=["empty", "absolute", "parent", "inner parent", "two slashes", "dot", "slash", "long", "backslash", "newline",
         "null", "deep"],
)  # fmt: skip
def test_a_glob_that_can_match_nothing_inside_is_refused(glob: str) -> None:
    with pytest.raises(ValueError, match="must"):
        check_glob(glob)
    with pytest.raises(TaskFamilyError, match=r"install_inputs\[0\]|install_inputs"):
        parse_manifest(f"tasks: {{}}\ninstall_inputs: [{glob!r}]\n".encode())


def test_no_more_globs_than_anybody_needs_are_allowed() -> None:
    assert parse_manifest(b"tasks: {}\ninstall_inputs: []\n").install_inputs == []
    assert parse_manifest(b"tasks: {}\n").install_inputs is None
    with pytest.raises(TaskFamilyError, match="install_inputs"):
        parse_manifest(("tasks: {}\ninstall_inputs: [" + "a, " * 101 + "]\n").encode())


def test_no_glob_takes_long() -> None:
    """One that tried every way to match would never end."""
    deep = "/".join(["*a*a*a*a*a*a*b*"] * 6 + ["**"] * 4)
    name = "/".join(["a" * 250] * 12)
    assert matching([check_glob(deep)], [name] * 20) == ()
    assert matching([check_glob("**/*a*" * 4)], [name] * 20) == tuple([name] * 20)
