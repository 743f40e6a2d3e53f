"""Tests the layout of the provisioner home."""

from __future__ import annotations

from pathlib import Path

from provisioner.store.home import Home


def test_only_the_owner_can_read_a_home(tmp_path: Path) -> None:
    home = Home(tmp_path / "deep" / "home")
    home.make()
    home.make()
    assert home.root.stat().st_mode & 0o777 == 0o700
    names = {path.name for path in home.root.iterdir()}
    assert names == {"images", "locks", "environments", "stacks", "archive", "batches"}


def test_a_homes_secret_stays_the_same_and_is_the_owners_alone(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    secret = home.secret
    assert len(secret) == 32
    assert Home(tmp_path / "home").secret == secret != Home(tmp_path / "other").secret
    assert (home.root / "secret").stat().st_mode & 0o777 == 0o600
