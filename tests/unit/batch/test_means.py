"""Means and standard errors, against Inspect's own."""

from __future__ import annotations

import math
import sys
from typing import cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from inspect_ai.scorer import MetricProtocol, SampleScore, Score, stderr

from provisioner.batch.means import mean, mean_of_means


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=50))
def test_the_standard_error_is_inspects(scores: list[float]) -> None:
    found = mean(scores)
    assert found is not None
    assert found.value == pytest.approx(math.fsum(scores) / len(scores), abs=1e-9)
    inspects = cast(MetricProtocol, stderr())([SampleScore(score=Score(value=score)) for score in scores])
    assert found.stderr == pytest.approx(inspects, rel=1e-6, abs=1e-6)


def test_a_single_score_has_no_standard_error_and_nan_is_none() -> None:
    assert str(mean([0.5, math.nan])) == "0.50"
    assert mean([math.nan]) is None
    assert mean([]) is None


def test_each_group_has_the_same_weight() -> None:
    assert str(mean_of_means([[1.0] * 9, [0.0]])) == "0.50 ± 0.50"
    assert mean_of_means([[0.0, 1.0], []]) == mean([0.0, 1.0])
    assert mean_of_means([[]]) is None


@example([sys.float_info.max] * 3)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1))
def test_no_finite_scores_are_too_large(scores: list[float]) -> None:
    found = mean(scores)
    assert found is not None
    assert math.isfinite(found.value)
