"""The family replaces the machine's programs, `tar` above all, and waits for the controller to use them.

What unpacks uploads is a program of ours in an interpreter of ours, which starts nothing else.
"""

from __future__ import annotations

import ast
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from provisioner.copying import copy_program, directories
from provisioner.copying.transfer import download, send_archive, send_input, upload
from provisioner.ssh.connection import Connection
from tests.unit.fakes.copies import ThisHost

PROGRAMS = ("tar", "rm", "mkdir", "mv", "cp", "cat", "chmod", "sh", "bash", "dirname", "python3", "gzip", "true")
STARTS = {"subprocess", "pty", "multiprocessing", "system", "popen", "posix_spawn", "posix_spawnp", "fork", "forkpty"}


@pytest.fixture
def used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replaces the machine's programs; each notes its name in a file when it runs, and fails."""
    programs, notes = tmp_path / "programs", tmp_path / "used"
    programs.mkdir()
    notes.touch()
    for name in PROGRAMS:
        (programs / name).write_text(f'#!/bin/sh\necho "{name}" >> {notes}\nexit 1\n')
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs))
    return notes


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source" / "deep").mkdir(parents=True)
    (tmp_path / "source" / "deep" / "file").write_text("1")
    return tmp_path / "source"


def to_a_new_place(connection: Connection, source: Path, inside: Path) -> Path:
    upload(connection, source, f"{inside}/new")
    return inside / "new"


def in_the_place_of_a_tree(connection: Connection, source: Path, inside: Path) -> Path:
    for _ in range(2):
        assert send_archive(
            connection, lambda archive: archive.add(source, "payload"), "replace", f"{inside}/new", user="agent"
        ).stderr == b""  # fmt: skip
    return inside / "new"


def beside_what_is_there(connection: Connection, source: Path, inside: Path) -> Path:
    def fill(archive: tarfile.TarFile) -> None:
        archive.add(source, ".")

    assert send_archive(connection, fill, "fill", f"{inside}/new", user="root").stderr == b""
    return inside / "new"


def a_file(connection: Connection, source: Path, inside: Path) -> Path:
    with (source / "deep" / "file").open("rb") as file:
        assert send_input(connection, file, "write", f"{inside}/new/deep/", "file", "644", user="root").stderr == b""
    return inside / "new"


def back_again(connection: Connection, source: Path, inside: Path) -> Path:
    download(connection, str(source), inside / "new")
    return inside / "new"


@pytest.mark.parametrize(
    "copy", [to_a_new_place, in_the_place_of_a_tree, beside_what_is_there, a_file, back_again], ids=lambda f: f.__name__
)
def test_no_copy_uses_a_program_of_the_machines(
    used: Path, source: Path, tmp_path: Path, copy: Callable[[Connection, Path, Path], Path]
) -> None:
    (tmp_path / "inside").mkdir()
    copied = copy(ThisHost().connection, source, tmp_path / "inside")
    assert (copied / "deep" / "file").read_text() == "1"
    assert [path.name for path in (tmp_path / "inside").iterdir()] == ["new"]
    assert used.read_text() == ""


def test_a_replaced_program_that_is_used_leaves_a_note(used: Path) -> None:
    assert os.system("tar -x") != 0
    assert used.read_text().split()[-1] == "tar"


@pytest.mark.parametrize("module", [copy_program, directories], ids=lambda module: module.__name__)
def test_what_copies_cannot_start_a_program(module: object) -> None:
    tree = ast.parse(Path(str(module.__file__)).read_text())  # type: ignore[attr-defined]
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert {name for name in names if name in STARTS or name.startswith(("exec", "spawn"))} == set()
