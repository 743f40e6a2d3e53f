"""Images of an account, found by controllers that did not make them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from provisioner.store.home import Home
from tests.aws.loopback import AccountOfMany
from tests.batch import many
from tests.command_line import CLI
from tests.homes import new_home

pytestmark = [pytest.mark.xdist_group("workers"), pytest.mark.timeout(1800)]


def test_another_controller_finds_images_by_tags(account: AccountOfMany, prepared: Home, tmp_path: Path) -> None:
    many.write_suite(tmp_path, "none", "sleep 1")  # and its family
    variables = many.variables(account.url, new_home(tmp_path / "home").root, tmp_path)
    built = subprocess.run(
        [*CLI, "image", "build", str(tmp_path / "many"), "--cloud", "aws", "--region", "us-east-1", "--json"],
        env=variables, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    assert json.loads(built.stdout)["image"] in {path.name for path in prepared.images.iterdir()}
    assert "Building" not in built.stderr
    assert "Reading the setup data" in built.stderr
