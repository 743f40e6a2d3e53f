"""Provides stacks for a real Terraform, with a stand-in for the program that its provisioners call."""

from __future__ import annotations

import json
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from provisioner.base.models import Role
from provisioner.clouds.local.cloud import LocalVariables
from provisioner.terraform.render import EnvironmentSpec, MachineSpec, render_stack
from provisioner.terraform.stack import Stack

KEY = "ssh-ed25519 AAAA"


def silent(_: str) -> None:
    """Reports nothing."""


def machine(image: str = "/nowhere/disk.qcow2") -> MachineSpec:
    """Returns the spec of a machine of the smallest size."""
    return MachineSpec(image=image, cpus=1, memory_gib=0.5, disk_gib=8, public_key=KEY)


@dataclass(frozen=True)
class Site:
    """A stack, the directory of its environments, and the calls that the stand-in recorded."""

    root: Path
    stack: Stack

    def spec(self, name: str, roles: tuple[Role, ...] = ("primary",), image: str = "/nowhere/d") -> EnvironmentSpec:
        """Returns the spec of an environment of the stack."""
        (self.root / name).mkdir(exist_ok=True)
        return EnvironmentSpec(
            environment_id=name,
            full_internet=False,
            machines={role: machine(image) for role in roles},
            variables=LocalVariables(directory=str(self.root / name)),
        )

    def write(self, *specs: EnvironmentSpec) -> None:
        """Writes the stack with these environments."""
        self.stack.write(render_stack("local", LocalVariables, {spec.environment_id: spec for spec in specs}))

    @property
    def directory(self) -> Path:
        """The stack's directory."""
        return self.root / "stack"

    @property
    def journal(self) -> list[dict[str, Any]]:
        """Returns all calls of the stand-in so far."""
        path = self.root / "journal"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def done(self, operation: str) -> list[str]:
        """Returns the machines that an operation was called for, sorted."""
        return sorted(entry["machine"] for entry in self.journal if entry["operation"] == operation)

    def sleep(self, name: str) -> Path:
        """Makes the starts of an environment wait until the file is removed."""
        path = self.root / name / "sleep"
        path.touch()
        return path


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Returns an empty stack whose provisioners run the stand-in."""
    program = tmp_path / "python"
    source = Path(__file__).with_name("stand_in.py").read_text()
    program.write_text(f"#!{sys.executable}\n{source}")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(program))
    return Site(tmp_path, Stack(tmp_path / "stack"))
