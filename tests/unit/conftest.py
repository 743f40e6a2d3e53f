"""Provides the command line in the tests' own process, which is fast enough to test every error."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

from provisioner.base.signals import SIGNALS
from provisioner.cli import app
from provisioner.session import Session
from provisioner.store.home import Home
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.terraform_program import use_fake_terraform
from tests.unit.fakes.world import Told


@dataclass
class Ended:
    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        return json.loads(self.stdout, parse_constant=refuse)


def refuse(constant: str) -> NoReturn:
    raise AssertionError(f"{constant} is not JSON")


class CommandLine:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], home: Path) -> None:
        self._monkeypatch, self._capsys, self.home = monkeypatch, capsys, home

    def __call__(self, *arguments: str) -> Ended:
        self._monkeypatch.setattr(sys, "argv", ["provisioner", *arguments])
        code = app.main()
        captured = self._capsys.readouterr()
        return Ended(code, captured.out, captured.err)


@pytest.fixture
def provisioner(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Iterator[CommandLine]:
    """Returns the command line in this process, on an empty home."""
    monkeypatch.setenv("PROVISIONER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield CommandLine(monkeypatch, capsys, tmp_path / "home")
    for number, handler in before.items():
        signal.signal(number, handler)


def nothing_was_created(home: Path) -> bool:
    return not [path for path in home.glob("*/*") if path.parent.name != "locks"]


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCloud]:
    """A cloud in a directory, for a home beside it, with a program in Terraform's place."""
    directory = tmp_path / "moon"
    use_fake_terraform(directory, monkeypatch)
    monkeypatch.setattr("provisioner.terraform.stack.RETRY_SECONDS", (0.0, 0.0))
    monkeypatch.setattr("provisioner.terraform.stack.THROTTLED_SECONDS", (0.0, 0.0))
    monkeypatch.setattr("provisioner.machines.destroy.SECOND_LOOK_SECONDS", 0.0)
    monkeypatch.setattr("provisioner.machines.boot.POLL_SECONDS", 0.01)
    home = Home(tmp_path / "home")
    home.make()
    cloud = FakeCloud(directory, home)
    yield cloud
    cloud.close()


@pytest.fixture
def session(cloud: FakeCloud) -> Session:
    """A session on the fake cloud, and a real home."""
    return Session(home=cloud.home, cloud=cloud, progress=Told(), variables={"TOKEN": "s3cret-value"})
