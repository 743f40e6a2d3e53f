"""Tests the helper's operations on files that a hostile agent can reach."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from tests.unit.guest.machine_directory import MIB, Machine

KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\nabc\n"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def read_submission(machine: Machine) -> Any:
    """Read the submission with a limit of 1 MiB."""
    path = str(machine.home / "submission.txt")
    return machine.run("read_submission", path=path, limit_bytes=MIB).value


def test_a_submission_is_read_as_it_is(machine: Machine) -> None:
    (machine.home / "submission.txt").write_bytes(b" a\r\nb\xff \n")
    assert read_submission(machine) == {"found": True, "text": " a\r\nb\ufffd \n", "reason": ""}


def test_an_empty_submission_is_found_and_a_missing_one_is_not(machine: Machine) -> None:
    assert read_submission(machine) == {"found": False, "text": "", "reason": ""}
    (machine.home / "submission.txt").touch()
    assert read_submission(machine) == {"found": True, "text": "", "reason": ""}


def plant_hard_link(path: Path) -> None:
    """Creates a hard link to another file."""
    (path.parent / "other").write_text("secret")
    path.hardlink_to(path.parent / "other")


def plant_huge(path: Path) -> None:
    """Creates a sparse file of a terabyte."""
    path.touch()
    os.truncate(path, 1 << 40)


@pytest.mark.parametrize(
    ("plant", "reason"),
    [
        (lambda path: path.symlink_to("/etc/shadow"), "it is a symbolic link"),
        (plant_hard_link, "it is a file with several names (hard links)"),
        (plant_huge, f"it is larger than {MIB} bytes"),
        (os.mkfifo, "it is not a regular file"),
        (os.mkdir, "it is not a regular file"),
    ],
    ids=["link", "hard-link", "huge", "fifo", "directory"],
)
def test_a_planted_submission_is_not_read(machine: Machine, plant: Any, reason: str) -> None:
    plant(machine.home / "submission.txt")
    assert read_submission(machine) == {"found": False, "text": "", "reason": reason}


def settle_home(machine: Machine, *, skip_chown: bool = False, instructions: str = "Do it.") -> Any:
    """Runs settle_home and returns its value."""
    return machine.run("settle_home", instructions=instructions, skip_chown=skip_chown).value


def write(path: Path, text: str = "", *, gid: int | None = None) -> Path:
    """Writes a file of root's with mode 0644."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o644)
    if gid is not None:
        os.chown(path, 0, gid)
    return path


@as_root
def test_the_home_is_the_agents_but_for_protected_files(machine: Machine) -> None:
    home, outside = machine.home, write(machine.root / "outside")
    agents = [write(home / name) for name in ("file", "a/b/file", ".bashrc", ".ssh/config", "a/.hidden/file")]
    protected = [write(home / name, gid=machine.protected_gid) for name in ("score.py", "a/data")]
    in_protected = write(home / "scorer/key")
    os.chown(home / "scorer", 0, machine.protected_gid)
    kept = [write(home / ".cache/file"), *protected, in_protected, home / "scorer", outside]
    (home / "link").symlink_to(outside)
    (home / "directory_link").symlink_to(machine.root / "etc")

    assert settle_home(machine) == {"warnings": []}

    assert {path: path.lstat().st_uid for path in agents} == dict.fromkeys(agents, 1000)
    assert {path: path.lstat().st_uid for path in kept} == dict.fromkeys(kept, 0)
    assert [path.lstat().st_uid for path in (home, home / "a", home / "link", home / ".cache")] == [1000, 1000, 1000, 0]
    assert (machine.root / "etc/passwd").stat().st_uid == 0


@as_root
def test_a_family_that_gives_its_files_itself_keeps_their_owners(machine: Machine) -> None:
    file, key = write(machine.home / "file"), write(machine.home / ".ssh/id_rsa", KEY)
    settle_home(machine, skip_chown=True)
    assert file.stat().st_uid == 0
    assert stat.S_IMODE(key.stat().st_mode) == 0o644
    assert (machine.home / "instructions.txt").stat().st_uid == 1000


def test_only_agents_private_keys_are_tightened(machine: Machine) -> None:
    ssh, outside = machine.home / ".ssh", write(machine.root / "key", KEY)
    keys = [write(ssh / "id_rsa", KEY), write(ssh / "more/id", "-----BEGIN RSA PRIVATE KEY-----\n")]
    others = [write(ssh / "id_rsa.pub", "ssh-rsa AAAA"), write(ssh / "config", "Host *\n"), outside]
    (ssh / "planted").symlink_to(outside)
    os.mkfifo(ssh / "fifo")
    settle_home(machine)
    assert [stat.S_IMODE(path.stat().st_mode) for path in keys] == [0o600, 0o600]
    assert [stat.S_IMODE(path.stat().st_mode) for path in others] == [0o644, 0o644, 0o644]


def test_a_home_whose_ssh_directory_is_a_link_is_safe(machine: Machine) -> None:
    outside = write(machine.root / "elsewhere/key", KEY)
    (machine.home / ".ssh").symlink_to(outside.parent)
    settle_home(machine)
    assert stat.S_IMODE(outside.stat().st_mode) == 0o644


def test_instructions_replace_a_planted_link(machine: Machine) -> None:
    outside = write(machine.root / "outside", "kept")
    (machine.home / "instructions.txt").symlink_to(outside)
    settle_home(machine, instructions="Tu été ${x}\n")
    file = machine.home / "instructions.txt"
    assert file.read_text() == "Tu été ${x}\n\n"
    assert (file.lstat().st_uid, stat.S_IMODE(file.lstat().st_mode)) == (machine.agent_uid, 0o644)
    assert outside.read_text() == "kept"
    assert [path.name for path in machine.home.iterdir()] == ["instructions.txt"]


def test_a_tree_that_is_too_deep_is_an_error_and_not_a_crash(machine: Machine) -> None:
    directory = os.open(machine.home, os.O_RDONLY)
    for _ in range(600):
        os.mkdir("d", dir_fd=directory)
        below = os.open("d", os.O_RDONLY, dir_fd=directory)
        os.close(directory)
        directory = below
    os.close(directory)

    result = machine.run("settle_home", instructions="", skip_chown=False).result

    assert "deeper than 400 levels" in result["message"]
