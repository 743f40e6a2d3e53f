"""Where a submission may come from."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from provisioner.base.errors import UsageError
from provisioner.cli.options import read_submission


def give(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_no_option_is_no_submission() -> None:
    assert read_submission(None, None) is None


@pytest.mark.parametrize("text", ["42", "", "--", "- "], ids=["text", "empty", "dashes", "space"])
def test_a_text_is_refused_as_it_was_in_the_process_list(text: str) -> None:
    with pytest.raises(UsageError, match="cannot be an argument") as refused:
        read_submission(text, None)
    assert "--submission-file FILE" in (refused.value.hint or "")
    assert "--submission -" in (refused.value.hint or "")


def test_standard_input_and_files_are_taken_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = " ünï\r\n\n"
    give(monkeypatch, text.encode())
    assert read_submission("-", None) == text
    (tmp_path / "answer").write_bytes(text.encode())
    assert read_submission(None, tmp_path / "answer") == text


def test_what_is_too_long_or_no_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("provisioner.environment.operations.SUBMISSION_LIMIT_BYTES", 10)
    give(monkeypatch, b"0123456789")
    assert read_submission("-", None) == "0123456789"
    for data, says in ((b"0123456789a", "is longer than"), (b"\xff", "is not UTF-8")):
        give(monkeypatch, data)
        with pytest.raises(UsageError, match=says):
            read_submission("-", None)


def test_an_unreadable_file_and_two_submissions_are_mistakes(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_submission(None, tmp_path / "missing")
    with pytest.raises(UsageError, match="either --submission or --submission-file"):
        read_submission("-", tmp_path / "missing")
