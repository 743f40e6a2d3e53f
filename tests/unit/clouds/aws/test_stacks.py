"""EC2's tokens for launches are shared by all applies, and never spent twice."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path

import pytest

from provisioner.base.errors import Interrupted
from provisioner.clouds.aws.stacks import BUCKET, PER_SECOND, await_turn, turn


def test_a_full_bucket_serves_the_first_at_once() -> None:
    assert turn(BUCKET, 0, 100, 2) == (100, BUCKET - 2)


def test_a_bucket_does_not_overflow() -> None:
    assert turn(BUCKET, 0, 1000, 1) == (1000, BUCKET - 1)


def test_a_large_apply_waits_for_a_full_bucket() -> None:
    begin, tokens = turn(BUCKET, 0, 10, 40)
    assert (begin, tokens) == (10, BUCKET - 40)
    assert turn(tokens, begin, 10, 2) == (10 + (40 - BUCKET + 2) / PER_SECOND, 0)


def test_applies_that_come_together_take_turns_and_keep_the_rate() -> None:
    tokens, at, begins = float(BUCKET), 0.0, []
    for _ in range(100):
        at, tokens = turn(tokens, at, 0.0, 2)
        begins.append(at)
    assert all(earlier <= later for earlier, later in pairwise(begins))
    # In any time, no more than a bucket and what comes into it.
    for first, begin in enumerate(begins):
        for last in range(first, len(begins)):
            assert 2 * (last - first + 1) <= BUCKET + (begins[last] - begin) * PER_SECOND


def test_processes_share_the_rate_and_report_long_waits(tmp_path: Path) -> None:
    said: list[str] = []
    await_turn(tmp_path / "launches", 2000, said.append, lambda: None)
    assert said == []

    def stop() -> None:
        raise Interrupted("told to stop")

    with pytest.raises(Interrupted):
        await_turn(tmp_path / "launches", 2, said.append, stop)
    [line] = said
    assert "two launches a second" in line


@pytest.mark.parametrize("noted", ["", "[1]", '["a", 1]', "{}", "[-1e300, 1]", "[1, 1e300]", "[NaN, 1]"])
def test_a_note_that_cannot_be_true_counts_for_nothing(tmp_path: Path, noted: str) -> None:
    path = tmp_path / "launches"
    path.write_text(noted)
    begin = time.monotonic()
    await_turn(path, BUCKET, lambda _: None, lambda: None)
    tokens, at = json.loads(path.read_text())
    assert (tokens, at >= begin) == (0, True)
