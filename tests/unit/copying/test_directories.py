"""Tests ways to directories, with and without links on them, and working directories."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from provisioner.copying import directories
from provisioner.copying.directories import MAX_COMPONENTS, open_destination, open_directory, working_directory

STRANGER = 54321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def inside(tmp_path: Path) -> Path:
    """Returns a directory with another in it, to which a link leads."""
    (tmp_path / "real" / "below").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    return tmp_path


def is_same(descriptor: int, path: Path) -> bool:
    return os.path.samestat(os.fstat(descriptor), path.stat())


@pytest.mark.parametrize("path", ["real/below", "./real//below/", "link/below", "link/../real/below/../below"])
def test_a_directory_is_opened_by_way_of_ones_own_links(inside: Path, path: str) -> None:
    with open_directory(f"{inside}/{path}") as descriptor:
        assert is_same(descriptor, inside / "real" / "below")


def test_relative_and_absolute_ways_lead_to_the_same(inside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(inside / "real")
    (inside / "absolute").symlink_to(inside / "link")
    for path in ("..", "below/../..", str(inside), "../absolute/.."):
        with open_directory(path) as descriptor:
            assert is_same(descriptor, inside)
    with open_directory("/../..") as descriptor:
        assert is_same(descriptor, Path("/"))


def test_missing_directories_are_created_on_demand(inside: Path) -> None:
    with pytest.raises(FileNotFoundError), open_directory(f"{inside}/link/new/er"):
        pass
    with open_directory(f"{inside}/link/new/er", create=True) as descriptor:
        assert is_same(descriptor, inside / "real" / "new" / "er")


def test_what_is_no_directory_is_refused(inside: Path) -> None:
    (inside / "file").touch()
    (inside / "loop").symlink_to("loop")
    (inside / "to_file").symlink_to("file")
    for name in ("file", "to_file", "file/below"):
        with pytest.raises(NotADirectoryError), open_directory(f"{inside}/{name}"):
            pass
    for path in (f"{inside}/loop", "/." * (MAX_COMPONENTS + 1)):
        with pytest.raises(OSError, match="components"), open_directory(path):
            pass


@pytest.mark.parametrize(
    ("mode", "owner"),
    [(0o777, 0), (0o775, 0), (0o1777, 0), pytest.param(0o755, STRANGER, marks=as_root)],
    ids=["all", "group", "sticky", "stranger"],
)
def test_a_link_that_others_could_have_placed_is_not_followed(inside: Path, mode: int, owner: int) -> None:
    inside.chmod(mode)
    if owner:
        os.chown(inside, owner, owner)
    for path in ("link", "link/below"):
        with pytest.raises(OSError, match="link that others could have placed"), open_directory(f"{inside}/{path}"):
            pass
    with open_directory(f"{inside}/real/below") as descriptor:
        assert is_same(descriptor, inside / "real" / "below")


def test_a_link_below_a_directory_of_others_is_not_followed(inside: Path) -> None:
    (inside / "real" / "link").symlink_to("below")
    with open_directory(f"{inside}/real/link"):
        pass
    inside.chmod(0o777)
    with pytest.raises(OSError, match="others could have placed"), open_directory(f"{inside}/real/link"):
        pass
    inside.chmod(0o1777)  # here others cannot rename what is not theirs
    with open_directory(f"{inside}/real/link"):
        pass


@as_root
def test_a_link_below_a_strangers_directory_is_not_followed_although_that_is_sticky(inside: Path) -> None:
    (inside / "real" / "link").symlink_to("below")
    os.chown(inside, STRANGER, STRANGER)
    inside.chmod(0o1755)  # the owner may rename all the same
    with pytest.raises(OSError, match="others could have placed"), open_directory(f"{inside}/real/link"):
        pass


def test_a_destination_is_a_directory_or_in_one(inside: Path) -> None:
    for path, directory, name in (
        (f"{inside}/link/", "real", "name"), (f"{inside}/link/new", "real", "new"), (f"{inside}/new/", ".", "new"),
    ):  # fmt: skip
        with open_destination(path, "name") as (descriptor, last):
            assert is_same(descriptor, inside / directory)
            assert last == name


def test_a_working_directory_is_private_and_leaves_nothing(inside: Path) -> None:
    def work_in(parent: int) -> None:
        with working_directory(parent) as work:
            os.mkdir("deep", dir_fd=work)
            os.symlink(inside / "real", "link", dir_fd=work)
            [name] = {path.name for path in inside.iterdir()} - {"real", "link"}
            assert (inside / name).stat().st_mode & 0o777 == 0o700
            raise KeyboardInterrupt

    with open_directory(str(inside)) as parent:
        with pytest.raises(KeyboardInterrupt):
            work_in(parent)
        assert {path.name for path in inside.iterdir()} == {"real", "link"}
        assert (inside / "real" / "below").exists()


def test_a_moved_working_directory_is_emptied_where_it_is(inside: Path) -> None:
    with open_directory(str(inside)) as parent, working_directory(parent) as work:
        [name] = {path.name for path in inside.iterdir()} - {"real", "link"}
        os.mkdir("mine", dir_fd=work)
        (inside / name).rename(inside / "moved")
        (inside / name).symlink_to("real")
    assert list((inside / "moved").iterdir()) == []
    assert (inside / "real" / "below").exists()


def test_a_tree_of_any_depth_is_removed_with_a_working_directory(inside: Path) -> None:
    with open_directory(str(inside)) as parent, working_directory(parent) as work:
        (name,) = {path.name for path in inside.iterdir()} - {"real", "link"}
        directory, depth = os.dup(work), 3000
        for level in range(depth):
            for entry in ("next", f"file{level}"):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(entry, dir_fd=directory) if entry == "next" else os.mknod(entry, dir_fd=directory)
            below = os.open("next", os.O_RDONLY, dir_fd=directory)
            os.close(directory)
            directory = below
        os.symlink(inside / "real", "link", dir_fd=directory)
        os.fchmod(directory, 0o500)
        os.close(directory)
    assert name.startswith(".copy.")
    assert {path.name for path in inside.iterdir()} == {"real", "link"}
    assert (inside / "real" / "below").is_dir()


@as_root
def test_a_users_tree_without_permissions_is_removed(inside: Path) -> None:
    os.chown(inside, STRANGER, STRANGER)
    with open_directory(str(inside)) as parent:
        os.seteuid(STRANGER)
        try:
            with working_directory(parent) as work:
                for directory in ("closed", "closed/inner", "closed/inner/innermost"):
                    os.mkdir(directory, dir_fd=work)
                os.chmod("closed/inner", 0o500, dir_fd=work)
                os.chmod("closed", 0, dir_fd=work)
        finally:
            os.seteuid(0)
    assert {path.name for path in inside.iterdir()} == {"real", "link"}


def test_a_tree_to_which_others_add_for_ever_is_given_up(inside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rmdir = os.rmdir

    def rmdir_of_what_others_fill(name: str, *, dir_fd: int) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(f"{name}/more", dir_fd=dir_fd)
        rmdir(name, dir_fd=dir_fd)

    monkeypatch.setattr(directories, "REMOVAL_SECONDS", 0.2)
    with open_directory(str(inside)) as parent, monkeypatch.context() as patched, working_directory(parent) as work:
        os.mkdir("tree", dir_fd=work)
        patched.setattr(os, "rmdir", rmdir_of_what_others_fill)
    [left] = {path.name for path in inside.iterdir()} - {"real", "link"}
    assert left.startswith(".copy.")
