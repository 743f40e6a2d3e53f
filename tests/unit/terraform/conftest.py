"""Provides small programs in Terraform's place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from provisioner.terraform.stack import Stack

Program = Callable[[str], Stack]


def silent(_: str) -> None:
    """Reports nothing."""


def error_line(summary: str, detail: str = "") -> str:
    """One error of Terraform's -json stream."""
    diagnostic = {"severity": "error", "summary": summary, "detail": detail}
    return json.dumps({"type": "diagnostic", "@message": f"Error: {summary}", "diagnostic": diagnostic})


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """Makes a shell script Terraform: `init` works, the rest is the script's. It counts its runs in `runs`."""
    monkeypatch.setattr("provisioner.terraform.stack.RETRY_SECONDS", (0.0, 0.0))
    monkeypatch.setattr("provisioner.terraform.stack.THROTTLED_SECONDS", (0.0, 0.0))

    def make(script: str) -> Stack:
        path = tmp_path / "terraform"
        path.write_text(f'#!/bin/sh\n[ "$1" = init ] && exit 0\necho "$@" >> {tmp_path}/runs\n{script}\n')
        path.chmod(0o755)
        monkeypatch.setenv("PROVISIONER_TERRAFORM", str(path))
        stack = Stack(tmp_path / "stack")
        stack.write({"main.tf": ""})
        return stack

    return make


def say(tmp_path: Path, text: str) -> str:
    """A shell command that prints exactly this text."""
    path = tmp_path / "said"
    path.write_text(text)
    return f"cat {path}"


def runs(tmp_path: Path) -> list[str]:
    """The arguments of each run but init."""
    return (tmp_path / "runs").read_text().splitlines()
