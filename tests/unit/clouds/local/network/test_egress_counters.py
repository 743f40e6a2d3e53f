"""Tests the counters that an egress proxy keeps for the controller."""

from __future__ import annotations

from pathlib import Path

import pytest

from provisioner.clouds.local.network.egress import Counters, Counts, read


def test_counts_can_be_read_at_once_and_take_bounded_space(tmp_path: Path) -> None:
    path = tmp_path / "counters"
    counters = Counters(path)
    assert read(path) == Counts()
    size = path.stat().st_size
    for total in range(1000):
        counters.frames_denied(total)
    counters.connected(is_allowed=True)
    counters.connected(is_allowed=True)
    counters.connected(is_allowed=False)
    assert read(path) == Counts(denied=999, onward=2, outside=1)
    assert path.stat().st_size == size


def test_without_a_file_they_stay_in_memory() -> None:
    Counters(None).connected(is_allowed=True)


@pytest.mark.parametrize("content", [b"", b"short", bytes(100)], ids=["empty", "short", "long"])
def test_a_file_that_holds_something_else_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "counters"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="no counters"):
        read(path)
