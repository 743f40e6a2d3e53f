"""What tests of batches share."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from provisioner.store.home import Home
from tests.aws.loopback import AccountOfMany, account_of_many
from tests.batch import many
from tests.command_line import CLI
from tests.homes import new_home


@pytest.fixture(scope="session")
def account(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AccountOfMany]:
    """One account for all."""
    with account_of_many(tmp_path_factory.mktemp("account")) as opened:
        yield opened


@pytest.fixture(scope="session")
def prepared(account: AccountOfMany, tmp_path_factory: pytest.TempPathFactory) -> Home:
    """The home of a controller that has run once: a region's network and the images are there."""
    directory = tmp_path_factory.mktemp("prepared")
    home = new_home(directory / "home")
    done = subprocess.run(
        [*CLI, "batch", "run", many.write_suite(directory, "first", "sleep 1"), "--json"],
        env=many.variables(account.url, home.root, directory), stdin=subprocess.DEVNULL, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return home
