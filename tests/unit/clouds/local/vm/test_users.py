"""The users of the processes beside a machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from provisioner.clouds.local.vm.processes import FIRST, LAST, NOBODY, User, own_user


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Pretends to be root; returns a directory with the maps of a process outside any user namespace."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    for name in ("uid_map", "gid_map"):
        (tmp_path / name).write_text("         0          0 4294967295\n")
    return tmp_path


def test_no_two_machines_have_one_user(root: Path) -> None:
    users = [own_user(Path("/home/environments/one"), root) for _ in range(20)]
    other = own_user(Path("/home/environments/two"), root)
    assert len({user.uid for user in users if user}) == 20
    assert len({user.gid for user in users if user}) == 1
    assert other is not None
    assert other.gid not in {user.gid for user in users if user}
    assert all(FIRST <= number <= LAST for user in users if user for number in (user.uid, user.gid))


@pytest.mark.parametrize("narrow", ["uid_map", "gid_map"])
def test_a_container_without_such_ids_uses_the_user_nobody(root: Path, narrow: str) -> None:
    (root / narrow).write_text("0 1000 1\n1 100000 65536\n")
    assert own_user(Path("/e"), root) == User(NOBODY, NOBODY)


def test_an_ordinary_user_keeps_its_own(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert own_user(Path("/e"), root) is None
