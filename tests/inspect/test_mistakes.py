"""Shows what a user reads whose eval cannot begin: one screen, and no traceback. No machine boots."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.inspect.running import said, started

EVAL = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.util import SandboxEnvironmentSpec

@task
def asks():
    return Task(dataset=[Sample(input="x"{sample})], sandbox="provisioner")
"""
SCREEN_LINES = 24


def _said(directory: Path, configuration: str, *options: str, sample: str = "", **variables: str) -> str:
    """Runs an eval with a configuration beside it, and returns what Inspect said."""
    (directory / "asks.py").write_text(EVAL.format(sample=sample))
    (directory / "provisioner.yaml").write_text(configuration)
    home = {"PROVISIONER_HOME": str(directory / "home"), "XDG_CONFIG_HOME": str(directory)}
    return said(started(directory, f"{directory}/asks.py@asks", *options, variables={**home, **variables}))


@pytest.mark.parametrize(
    ("configuration", "says"),
    [
        ("cloud: aws\nregion: us-east-1\n", "No AWS credentials were found."),
        ("cluod: local\n", "cluod: unknown key"),
        ("family: nowhere\ntask: main\n", "nowhere does not exist"),
    ],
    ids=["credentials", "key", "family"],
)
def test_what_the_operator_can_mend_is_one_screen(tmp_path: Path, configuration: str, says: str) -> None:
    nothing = str(tmp_path / "nothing")
    files = {"AWS_SHARED_CREDENTIALS_FILE": nothing, "AWS_CONFIG_FILE": nothing}
    keys = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}
    output = _said(tmp_path, configuration, **files, **keys, AWS_EC2_METADATA_DISABLED="true")
    assert says in " ".join(output.split())  # Inspect breaks lines
    assert "Traceback" not in output
    assert len(output.splitlines()) <= SCREEN_LINES
