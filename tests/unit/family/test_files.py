"""Which files of a family go into a machine, and the digest that names them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from provisioner.base.errors import TaskFamilyError
from provisioner.family import files
from provisioner.family.files import check_glob, digest_files, is_skipped, list_files, matching
from provisioner.family.manifest import parse_manifest


def write(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    return root


@pytest.mark.parametrize(
    ("path", "skipped"),
    [
        (".", False),
        (".git", True),
        (".git/config", True),
        ("assets/.git/config", False),
        (".venv/bin/python", True),
        ("assets/.venv", False),
        ("__pycache__/a.pyc", True),
        ("assets/__pycache__", True),
        ("assets/a.pyc", False),
        (".env", False),
        (".DS_Store", True),
        ("my__pycache__", False),
    ],
    ids=str,
)
def test_what_every_checkout_has_and_no_task_needs_is_skipped(path: str, skipped: bool) -> None:
    assert is_skipped(Path(path)) is skipped


def test_files_are_listed_sorted_and_relative_to_the_family(tmp_path: Path) -> None:
    write(tmp_path, "b/z", "b/a", "a", ".hidden", "__pycache__/x", "b/.git/config")
    (tmp_path / "empty").mkdir()
    assert list_files(tmp_path) == (".hidden", "a", "b/.git/config", "b/a", "b/z")
    assert list_files(tmp_path, tmp_path / "b") == ("b/.git/config", "b/a", "b/z")


def test_a_link_to_a_directory_is_listed_and_not_entered(tmp_path: Path) -> None:
    write(tmp_path, "real/file")
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "real" / "up").symlink_to("..")
    (tmp_path / "broken").symlink_to("nothing")
    assert list_files(tmp_path) == ("broken", "link", "real/file", "real/up")


def test_a_link_that_leads_out_through_another_is_refused(tmp_path: Path) -> None:
    root = write(tmp_path / "root", "file")
    write(tmp_path, "outside")
    (root / "here").symlink_to(".")
    (root / "link").symlink_to("here/../../outside")
    with pytest.raises(TaskFamilyError, match="'link' leads out"):
        list_files(root)


@pytest.mark.parametrize(
    ("bound", "says"),
    [("MAXIMUM_FILES", "contains more than 2 files"), ("MAXIMUM_TOTAL_BYTES", "exceed 0 GiB in total")],
    ids=["files", "bytes"],
)
def test_the_bounds_are_inclusive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str, says: str) -> None:
    write(tmp_path, "a", "b", "c")  # three files of a byte each
    monkeypatch.setattr(files, bound, 3)
    assert len(list_files(tmp_path)) == 3
    monkeypatch.setattr(files, bound, 2)
    with pytest.raises(TaskFamilyError, match=says):
        list_files(tmp_path)


def changes() -> dict[str, Callable[[Path], object]]:
    return {
        "contents": lambda root: (root / "file").write_text("other"),
        "executable": lambda root: (root / "file").chmod(0o755),
        "target": lambda root: ((root / "link").unlink(), (root / "link").symlink_to("other")),
        "kind": lambda root: ((root / "link").unlink(), (root / "link").write_text("file")),
    }


@pytest.mark.parametrize("change", changes())
def test_the_digest_changes_with_a_files(tmp_path: Path, change: str) -> None:
    write(tmp_path, "file")
    (tmp_path / "link").symlink_to("file")
    before = digest_files(tmp_path, ("file", "link"))
    changes()[change](tmp_path)
    assert digest_files(tmp_path, ("file", "link")) != before


def test_the_digest_tells_names_and_contents_apart(tmp_path: Path) -> None:
    for name, text in (("a", "bc"), ("ab", "c"), ("abc", "")):
        (tmp_path / name).write_text(text)
    names = [(), ("a",), ("ab",), ("abc",), ("a", "ab"), ("ab", "a")]
    assert len({digest_files(tmp_path, one) for one in names}) == len(names)


def test_the_digest_is_of_what_is_named_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path, "file")
    before = digest_files(tmp_path, ("file",))
    write(tmp_path, "other")
    os.utime(tmp_path / "file", (0, 0))
    (tmp_path / "file").chmod(0o600)
    assert digest_files(tmp_path, ("file",)) == before


def test_a_file_that_is_gone_is_told(tmp_path: Path) -> None:
    with pytest.raises(TaskFamilyError, match="'gone' cannot be read: No such file"):
        digest_files(tmp_path, ("gone",))


def test_a_file_whose_disk_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "bad")

    def fail(_: object) -> NoReturn:
        raise OSError(5, "Input/output error")  # as a failing read does, without a name

    monkeypatch.setattr(files, "_contents", fail)
    with pytest.raises(TaskFamilyError, match="'bad' cannot be read: Input/output error"):
        digest_files(tmp_path, ["bad"])


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
