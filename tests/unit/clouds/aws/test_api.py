"""Which region is used. What AWS's errors become, tests/aws shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from provisioner.clouds.aws.api import Api
from provisioner.errors import UsageError


def test_the_region_is_the_one_given_or_that_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    with pytest.raises(UsageError, match="No AWS region") as caught:
        Api(None, None)
    assert "AWS_REGION" in (caught.value.hint or "")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-west-2")
    assert Api(None, None).region == "us-west-2"
    # As the message says, and as Terraform reads it.
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    assert Api(None, None).region == "eu-west-1"
    assert Api(None, "eu-north-1").region == "eu-north-1"
