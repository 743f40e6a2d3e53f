"""Secrets in a family's files are found, and not shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from provisioner.family.checks import secrets
from tests.unit.family.checks.families import checked, found

KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\n" + "b3BlbnNzaC1rZXktdjEAAAAABG5vbmUAAAA\n"
VALUES = {"TOKEN": "s3cret-value", "SHORT": "abc"}


def test_a_value_of_the_env_file_is_found_by_its_name(tmp_path: Path) -> None:
    result = checked(tmp_path, files={"data/notes.txt": "abc\n\nx s3cret-value\n"}, variables=VALUES)
    assert found(result) == ["warning secret-in-file data/notes.txt:3"]
    assert "TOKEN" in result.findings[0].what
    assert "s3cret" not in repr(result)
    assert found(checked(tmp_path)) == []


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (f"x\n{KEY}", "a private key"),
        ("id = AKIA" + "Q" * 16, "an AWS access key"),
        ("ghp_" + "a1" * 18, "a GitHub token"),
        ("sk-ant-" + "a1" * 20, "an OpenAI or Anthropic key"),
        ("xoxb-" + "1-" * 20, "a Slack token"),
    ],
    ids=["key", "aws", "github", "anthropic", "slack"],
)
def test_what_looks_like_a_secret_is_found(tmp_path: Path, text: str, what: str) -> None:
    result = checked(tmp_path, files={"secret": text})
    assert [finding.rule for finding in result.findings] == ["secret-in-file"]
    assert what in result.findings[0].what


@pytest.mark.parametrize(
    "text", ["-----BEGIN PUBLIC KEY-----\nAAAA", "grep 'BEGIN PRIVATE KEY'", "task-ghp_x", "sk-learn", "AKIAXX"]
)
def test_what_only_speaks_of_secrets_is_not(tmp_path: Path, text: str) -> None:
    assert found(checked(tmp_path, files={"words": text})) == []


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    checked(tmp_path, files={"secret": KEY})
    (tmp_path / "fam" / "link").symlink_to("secret")
    assert len(checked(tmp_path).findings) == 1


def test_a_family_that_is_too_large_is_searched_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "MAXIMUM_TOTAL_BYTES", 100)
    assert [finding.rule for finding in checked(tmp_path, files={"a": "x" * 100}).findings] == ["not-checked"]
    monkeypatch.undo()
    monkeypatch.setattr(secrets, "MAXIMUM_FILES", 1)
    assert [finding.rule for finding in checked(tmp_path).findings] == ["not-checked"]
