"""A link lies where `cp` writes: nothing is written through it.

The attacker is another user of the controller's host, who can write to the directory that the operator copies to, or an
earlier copy out of a hostile machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from provisioner.base.errors import TaskError, UsageError
from provisioner.copying import transfer
from provisioner.copying.copy_program import END, FILE, PIECE
from provisioner.ssh.exec_frames import frame
from tests.unit.fakes.copies import HostileMachine, directory, file, tree

STRANGER = 54321


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """Returns a directory like /tmp: everybody may write to it."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o1777)
    return tmp_path / "shared"


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """Returns a directory of the operator's, to which the attacker's links lead."""
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "wanted").write_text("mine")
    return tmp_path / "precious"


def copy(destination: Path, answer: Iterator[bytes] | None = None, source: str = "wanted") -> None:
    machine = HostileMachine(answer or iter([file(b"") + frame(END)]))
    transfer.download(machine.connection, source, destination)


def as_destination(shared: Path, precious: Path) -> Path:
    (shared / "out").symlink_to(precious)
    return shared / "out"


def as_a_parent(shared: Path, precious: Path) -> Path:
    (shared / "out").symlink_to(precious)
    return shared / "out" / "wanted"


def as_the_new_file(shared: Path, precious: Path) -> Path:
    (shared / "wanted").symlink_to(precious / "wanted")
    return shared


def as_a_link_to_nothing(shared: Path, precious: Path) -> Path:
    (shared / "wanted").symlink_to(precious / "new")
    return shared


def as_a_link_to_a_directory(shared: Path, precious: Path) -> Path:
    (shared / "wanted").symlink_to(precious)
    return shared


PLANTS = [as_destination, as_a_parent, as_the_new_file, as_a_link_to_nothing, as_a_link_to_a_directory]


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_link_is_not_followed(shared: Path, precious: Path, plant: Callable[[Path, Path], Path]) -> None:
    destination = plant(shared, precious)
    with pytest.raises(UsageError):
        copy(destination)
    assert [(path.name, path.read_text()) for path in precious.iterdir()] == [("wanted", "mine")]
    assert len(list(shared.iterdir())) == 1


@pytest.mark.parametrize("plant", PLANTS[2:], ids=lambda plant: plant.__name__)
def test_a_link_planted_while_the_copy_arrives_is_not_followed(
    shared: Path, precious: Path, plant: Callable[[Path, Path], Path]
) -> None:
    def answer() -> Iterator[bytes]:
        yield frame(FILE) + frame(PIECE, b"con")
        plant(shared, precious)
        yield frame(END)

    copy(shared, answer())
    assert [(path.name, path.read_text()) for path in precious.iterdir()] == [("wanted", "mine")]
    assert (shared / "wanted").read_text() == "con"
    assert not (shared / "wanted").is_symlink()


def test_a_destination_swapped_during_a_copy_leads_nowhere(tmp_path: Path, precious: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()

    def answer() -> Iterator[bytes]:
        yield frame(FILE) + frame(PIECE, b"con")
        target.rename(tmp_path / "moved")
        target.symlink_to(precious)
        yield frame(END)

    copy(target, answer())
    assert (precious / "wanted").read_text() == "mine"
    assert [path.name for path in (tmp_path / "moved").iterdir()] == ["wanted"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_link_of_another_user_is_not_followed(tmp_path: Path, precious: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "out").symlink_to(precious)
    os.chown(theirs, STRANGER, STRANGER)
    os.chown(theirs / "out", STRANGER, STRANGER, follow_symlinks=False)
    for destination in (theirs / "out", theirs / "out" / "wanted"):
        with pytest.raises(UsageError, match="link that others could have placed"):
            copy(destination)
    assert (precious / "wanted").read_text() == "mine"


def test_a_second_copy_finds_no_link_of_the_first(tmp_path: Path, precious: Path) -> None:
    """The format has no links, so an attacker can only name something that is one already."""
    for kind in (b"l", b"h", b"2"):
        with pytest.raises(TaskError):
            copy(tmp_path, iter([frame(kind, b"") + frame(END)]))
        with pytest.raises(TaskError):
            copy(tmp_path, iter([tree(frame(kind, os.fsencode(precious)))]))
    copy(tmp_path, iter([tree(directory(b"a"))]), "first")
    with pytest.raises(UsageError, match="exists and is a directory"):
        copy(tmp_path, iter([tree(directory(b"a"))]), "first")
    assert [path.is_symlink() for path in tmp_path.rglob("*")].count(True) == 0
